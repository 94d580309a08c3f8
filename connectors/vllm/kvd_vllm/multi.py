"""kvd as a child of vLLM's MultiConnector. That one passes the handshake of its first child that has one to all children, and shows each of them the parameters of
every request. NixlConnector raises at a foreign handshake and at a hand-over that names no blocks. So kvd teaches its parent both, on the object, not the class (decision 054)."""

from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorHandshakeMetadata

from kvd_vllm import handover

logger = logging.getLogger("vllm.kvd")


@dataclass
class KvdHandshakes(KVConnectorHandshakeMetadata):
    """What the children of a rank's MultiConnector say at start, in their order; None: nothing."""

    children: list[KVConnectorHandshakeMetadata | None] = field(default_factory=list)


def parent() -> Any:
    """The MultiConnector that makes the connector that is being made now; None: vLLM itself does. An engine whose children answer with equal keys dies."""
    frame = sys._getframe()
    while frame is not None and type(frame.f_locals.get("self")).__name__ != "MultiConnector":
        frame = frame.f_back
    return None if frame is None else frame.f_locals["self"]


def _gather(multi: Any) -> KvdHandshakes:
    """get_handshake_metadata() of a rank."""
    return KvdHandshakes([child.get_handshake_metadata() for child in multi._connectors])


def _spread(multi: Any, setter: str, to_all: Callable[[dict[Any, Any]], None], metadata: dict[Any, Any]) -> None:
    """set_xfer_handshake_metadata*(): every child gets what its own halves on the ranks have said. to_all: vLLM's way, for ranks that could not change their parent."""
    if not all(isinstance(said, KvdHandshakes) for said in metadata.values()):
        to_all(metadata)
        return
    for i, child in enumerate(multi._connectors):
        own = {rank: said.children[i] for rank, said in metadata.items()}
        getattr(child, setter)({rank: one for rank, one in own.items() if one is not None})


def _claim_first(on_new_request: Callable[[Any], None], request: Any) -> None:
    handover.claim(request)
    on_new_request(request)


def separate_children(multi: Any, claims: bool) -> bool:
    """Give every child its own handshake; `claims`: and leave to kvd alone the requests that name it. False: this MultiConnector is built in another way, and stays as it is."""
    if not isinstance(getattr(multi, "_connectors", None), list) or not callable(getattr(multi, "on_new_request", None)):
        logger.warning("kvd: this vLLM's MultiConnector is not known, so it passes no handshake of kvd")
        return False
    if "get_handshake_metadata" not in vars(multi):  # by another kvd child
        multi.get_handshake_metadata = functools.partial(_gather, multi)
        for setter in ("set_xfer_handshake_metadata", "set_xfer_handshake_metadata_pp_aware"):
            setattr(multi, setter, functools.partial(_spread, multi, setter, getattr(multi, setter)))
    if claims:
        multi.on_new_request = functools.partial(_claim_first, multi.on_new_request)
    return True
