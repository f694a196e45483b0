"""Weights to a server, from disk and by broadcast: `python -m benchmarks.weight_transport URL CHECKPOINT`.

URL is a running server of the model in CHECKPOINT (docs/sglang.md, "A server of your own"). The two transports send the
same weights in turn, and the medians and their ratio are printed. The time is that of one update, from the weights in
the trainer's memory until the server holds them; the first of each kind warms up and is not counted.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import time
from pathlib import Path

import torch
from transformers import Qwen3MoeForCausalLM

from experiments.engines.sglang.broadcast import Broadcast
from experiments.engines.sglang.client import SGLangClient
from experiments.engines.sglang.transport import Disk, Transport
from experiments.engines.sglang.weights import Publisher


async def measure(url: str, checkpoint: Path, rounds: int) -> dict[str, list[float]]:
    """Returns the seconds of every update by name of the transport."""
    model = Qwen3MoeForCausalLM.from_pretrained(str(checkpoint), dtype=torch.float32)
    weights = model.state_dict()
    size = sum(tensor.nbytes for tensor in weights.values())
    print(f"{len(weights)} tensors, {size / 1e6:.1f} MB in float32")
    publisher = Publisher(model.config, torch.float32, None)
    transports: dict[str, Transport] = {
        "disk": Disk(publisher),
        "gloo": Broadcast(publisher, torch.float32, "gloo"),
    }
    took: dict[str, list[float]] = {name: [] for name in transports}
    client = SGLangClient(url, max_connections=2, request_timeout_s=60.0)
    await client.pause("abort")
    try:
        for transport in transports.values():
            await transport.connect(client)
        for version in range(1, rounds + 2):
            for name, transport in transports.items():
                started = time.perf_counter()
                await transport.stage(weights, version)
                ok, message = await transport.send(client, flush_cache=True)
                if not ok:
                    raise RuntimeError(f"{name}: {message}")
                took[name].append(time.perf_counter() - started)
        await client.resume()
    finally:
        for transport in transports.values():
            await transport.close(client)
        await client.close()
    return {name: seconds[1:] for name, seconds in took.items()}


def main() -> None:
    """Measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url", metavar="URL")
    parser.add_argument("checkpoint", metavar="CHECKPOINT", type=Path)
    parser.add_argument("--rounds", type=int, default=20, help="updates by each transport (default: %(default)s)")
    options = parser.parse_args()
    took = asyncio.run(measure(options.url, options.checkpoint, options.rounds))
    medians = {name: statistics.median(seconds) for name, seconds in took.items()}
    for name, median in medians.items():
        print(f"{name}: median {1e3 * median:.1f} ms, {1e3 * min(took[name]):.1f} to {1e3 * max(took[name]):.1f}")
    print(f"disk / gloo: {medians['disk'] / medians['gloo']:.2f}")


if __name__ == "__main__":
    main()
