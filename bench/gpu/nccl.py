"""Dispatch and combine over NVLink (gpu_ep link) against torch's all_to_all_single over NCCL, of the same rows: nccl.py --gpu-ep PROGRAM --out DIR writes DIR/nccl.json.
A token's row goes once to the other rank: NCCL gets rows of that size, and nothing for the own rank. Rounds of both alternate."""

from __future__ import annotations

import argparse
import json
import socket
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

TOKENS = {128: 4.0, 4096: 1.5}  # a rank, and the goal
WIDTHS = (2048, 7168)
EXPERTS, TOP_K, RANKS = 128, 8, 2
ROUNDS, TIMED = 5, 50
MOVED = "rows dispatched and returned"


def remote_rows(tokens: int) -> int:
    """Of them, those with an expert on the other rank: all but a few whose experts are all on their own."""
    local = 1.0
    for i in range(TOP_K):
        local *= (EXPERTS / RANKS - i) / (EXPERTS - i)
    return round(tokens * (1 - local))


def worker(rank: int, port: int, requests: Any, answers: Any) -> None:
    import torch
    import torch.distributed as dist

    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=RANKS)
    while True:
        asked = requests[rank].get()
        if asked is None:
            break
        tokens, hidden = asked
        rows = remote_rows(tokens)
        splits = [0 if r == rank else rows for r in range(RANKS)]
        sent = torch.randn(rows, hidden, device="cuda", dtype=torch.bfloat16)
        come, back = torch.empty_like(sent), torch.empty_like(sent)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)

        def both() -> None:
            dist.all_to_all_single(come, sent, splits, splits)  # noqa: B023
            dist.all_to_all_single(back, come, splits, splits)  # noqa: B023

        for _ in range(10):
            both()
        torch.cuda.synchronize()
        dist.barrier()
        begin.record()
        for _ in range(TIMED):
            both()
        end.record()
        torch.cuda.synchronize()
        if not torch.equal(back, sent):
            raise RuntimeError("what came back is not what was sent")
        answers.put((rank, begin.elapsed_time(end) / 1e3 / TIMED))
    dist.destroy_process_group()


class Nccl:
    def __init__(self) -> None:
        import torch.multiprocessing as mp

        context = mp.get_context("spawn")
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.requests = [context.Queue() for _ in range(RANKS)]
        self.answers = context.Queue()
        self.processes = [context.Process(target=worker, args=(rank, port, self.requests, self.answers), daemon=True) for rank in range(RANKS)]
        for process in self.processes:
            process.start()

    def rate(self, tokens: int, hidden: int) -> float:
        """GB/s of what a rank sends in a dispatch and its combine."""
        for queue in self.requests:
            queue.put((tokens, hidden))
        seconds = max(self.answers.get(timeout=120)[1] for _ in range(RANKS))
        return 2 * remote_rows(tokens) * hidden * 2 / seconds / 1e9

    def close(self) -> None:
        for queue in self.requests:
            queue.put(None)
        for process in self.processes:
            process.join(30)


def ours(program: Path, tokens: int) -> dict[str, float]:
    """GB/s of each row of gpu_ep link."""
    ended = subprocess.run([str(program), "link", "--json", "--rounds", "3", "--with", f"tokens={tokens}"], capture_output=True, text=True, timeout=120)
    found = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    if ended.returncode != 0 or not found:
        raise RuntimeError(f"{program} link: status {ended.returncode}: {ended.stderr[-200:]}")
    return {line["name"]: line["value"] for line in found}


def judge(name: str, rates: list[float], references: list[float], least: float | None) -> dict[str, Any]:
    ratio = statistics.median(a / b for a, b in zip(rates, references))
    value, reference = statistics.median(rates), statistics.median(references)
    found: dict[str, Any] = {"name": name, "value": round(value, 2), "unit": "GB/s", "reference": "torch's all_to_all_single over NCCL", "reference_value": round(reference, 2), "ratio": round(ratio, 3)}
    if least:
        found |= {"goal": f"ratio >= {least:g}", "goal_met": ratio >= least}
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--gpu-ep", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("."))
    args = parser.parse_args()
    try:
        import torch
    except ImportError:
        print("nccl.py: skipped: there is no torch")
        return 77
    if torch.cuda.device_count() < RANKS:
        print(f"nccl.py: skipped: {torch.cuda.device_count()} GPUs, where {RANKS} are needed")
        return 77
    nccl = Nccl()
    lines = []
    for tokens, least in TOKENS.items():
        rates: dict[str, list[float]] = {}
        references: dict[int, list[float]] = {hidden: [] for hidden in WIDTHS}
        for _ in range(ROUNDS):
            for name, value in ours(args.gpu_ep, tokens).items():
                rates.setdefault(name, []).append(value)
            for hidden in WIDTHS:
                references[hidden].append(nccl.rate(tokens, hidden))
        for name, values in rates.items():
            hidden = next(width for width in WIDTHS if f"H {width}," in name)
            lines.append(judge(f"{name}, against NCCL", values, references[hidden], least if MOVED in name else None))
    nccl.close()
    args.out.mkdir(parents=True, exist_ok=True)
    with (args.out / "nccl.json").open("w") as out:
        for line in lines:
            print(f"{line['name']:100s} {line['value']:>9g} {line['reference_value']:>9g} {line['ratio']:>7g}  {line.get('goal', '')}", flush=True)
            out.write(json.dumps(line, separators=(",", ":")) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
