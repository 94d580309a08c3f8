"""Hand-overs: what the kv_transfer_params of a request ask for, and what an engine answers to one that it has computed for another. The names are those of vLLM's own
connectors, so that their proxies work unmodified; `transfer_id`, `transfer_peer` and `transfer_device` are ours."""

from __future__ import annotations

import logging
import secrets
import socket
from dataclasses import dataclass
from typing import Any

logger = logging.getLogger("vllm.kvd")

MAX_TRANSFER = 128  # bytes: KVC_MAX_TRANSFER
MAX_PEER = 64  # bytes: KVC_MAX_PEER
MAX_DEVICE = 63  # bytes: KVX_DEVICE_MAX
NO_DEVICE = "none"  # transfer_device of a request that is handed over in host memory alone
OURS = ("transfer_id", "transfer_peer", "transfer_device")
FINISHED = ("FINISHED_STOPPED", "FINISHED_LENGTH_CAPPED")


def _text(name: str, value: Any, most: int) -> str:
    if not isinstance(value, str) or not 0 < len(value.encode(errors="replace")) <= most or not value.isprintable():
        raise ValueError(f"{name} must be 1 to {most} bytes of printable text")
    return value


def _wants_send(params: dict[str, Any]) -> bool:
    return bool(params.get("do_remote_decode") or params.get("transfer_sends"))


def claim(request: Any) -> None:
    """Before any child of a MultiConnector sees the request: one that names kvd's hand-over loses the keys that other connectors would act on."""
    params = request.kv_transfer_params
    if isinstance(params, dict) and params.get("transfer_id") is not None:
        ours = {key: params[key] for key in OURS if key in params}
        request.kv_transfer_params = ours | {"transfer_sends": _wants_send(params)}


@dataclass
class Handovers:
    """Of one engine. `sends` and `receives` are its role; child: other connectors of a MultiConnector may hand over as well, and answer with the same names;
    peer: the node that computes prompts of requests that name none, None: this one; device: the GPU of the engine that does, None: not known; own_device: what is sent is
    handed over in memory of this engine's GPU as well."""

    engine_id: str
    ranks: int
    sends: bool
    receives: bool
    child: bool
    peer: str | None = None
    device: str | None = None
    own_device: bool = True
    complaints: int = 0

    def find(self, request: Any) -> tuple[bool, str, str | None, str | None] | None:
        """Whether the request is sent or received, its transfer id, the node it is received from (None: this one), and the GPU in whose memory it may be (None: in none).
        None: neither, or it is another connector's."""
        params = request.kv_transfer_params
        try:
            named = params.get("transfer_id")
            wants_send = _wants_send(params)
            if named is None and (self.child or not wants_send):
                return None
            transfer = _text("transfer_id", named, MAX_TRANSFER) if named is not None else secrets.token_hex(16)
            peer = params.get("transfer_peer")
            peer = self.peer if peer is None else _text("transfer_peer", peer, MAX_PEER)
            device = params.get("transfer_device")
            device = self.device if device is None else _text("transfer_device", device, MAX_DEVICE)
        except (AttributeError, ValueError) as error:
            return self._complain(request, str(error))
        if not (self.sends if wants_send else self.receives):
            return self._complain(request, f"kv_role keeps it from being {'sent' if wants_send else 'received'}")
        if wants_send:
            return True, transfer, None, "own" if self.own_device and device != NO_DEVICE else None
        return False, transfer, peer, None if device == NO_DEVICE else device

    def params(self, request: Any, transfer: str, node: str, device: str) -> dict[str, Any] | None:
        """For the engine that goes on with a request that has been computed; None: it has not been. `node`: what the daemons of other nodes call this one; empty: it has no peers.
        `device`: the GPU in whose memory the prompt is; empty: in none."""
        if request.status.name not in FINISHED:
            return None
        ours = {"transfer_id": transfer} | ({"transfer_peer": node} if node else {}) | ({"transfer_device": device} if device else {})
        if self.child:
            return ours
        return ours | {
            "do_remote_prefill": True,
            "do_remote_decode": False,
            "remote_engine_id": self.engine_id,
            "remote_request_id": request.request_id,
            "remote_block_ids": None,
            "remote_host": socket.gethostname(),
            "remote_port": None,
            "remote_num_tokens": request.num_prompt_tokens,
            "tp_size": self.ranks,
        }

    def _complain(self, request: Any, why: str) -> None:
        """The request is served without a hand-over. Said for the first ones only: clients choose the parameters."""
        self.complaints += 1
        if self.complaints <= 10:
            logger.warning("kvd: request %s is not handed over: %s", request.request_id, why)
