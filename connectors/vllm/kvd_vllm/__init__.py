"""kvd's connector for vLLM. `connector.KvdConnector` is what vLLM loads; `register()` is the entry point that makes its name known."""

__version__ = "0.2.0"


def register() -> None:
    """vllm.general_plugins: `"kv_connector":"KvdConnector"` then needs no module path."""
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    if "KvdConnector" not in KVConnectorFactory._registry:
        KVConnectorFactory.register_connector("KvdConnector", "kvd_vllm.connector", "KvdConnector")
