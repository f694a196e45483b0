"""How weights reach a server: as a folder that it reads, or by broadcast (broadcast.py). The engine knows no other."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

import torch

from experiments.engines.sglang.client import SGLangClient
from experiments.engines.sglang.weights import Publisher

NOT_FLUSHED = "Weights were updated"
"""How SGLang's message begins when it holds the new weights beside a prefix cache of the old ones."""


class Transport(Protocol):
    """Takes one set of weights after the other, and gives the newest to a server.

    Attributes:
        folder_has_weights: a server that starts from `folder` holds the newest weights.
    """

    folder_has_weights: bool

    async def stage(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Takes new weights (transformers' state_dict layout); no server sees them yet.

        Raises:
            OSError: they cannot be written; those of before are still the newest.
        """
        ...

    def folder(self) -> Path:
        """Returns a folder from which a server of the model can start.

        Raises:
            OSError: it cannot be written.
        """
        ...

    async def connect(self, client: SGLangClient) -> None:
        """Prepares a server that runs for `send`; what an earlier server needed is dropped.

        Raises:
            ServerRefused: the server cannot be reached in this way; its weights are as they were.
            ConnectionLost: it did not answer, or did not take part.
        """
        ...

    async def send(self, client: SGLangClient, *, flush_cache: bool) -> tuple[bool, str]:
        """Returns whether the server says that it holds and uses the newest weights alone, and its message.

        Raises:
            ServerRefused: it may hold anything.
            ConnectionLost: so it may.
        """
        ...

    async def close(self, client: SGLangClient | None) -> None:
        """Removes everything; `client`: of a server that goes on without us. May be called twice."""
        ...


class Disk:
    """Weights as checkpoints on a file system that the server also sees."""

    folder_has_weights = True

    def __init__(self, publisher: Publisher):
        self._publisher = publisher
        self._folder: Path | None = None
        self._version = 0

    async def stage(self, weights: Mapping[str, torch.Tensor], version: int) -> None:
        """Writes them; see `Transport`."""
        self._folder, self._version = await asyncio.to_thread(self._publisher.publish, weights, version), version

    def folder(self) -> Path:
        """Returns the newest checkpoint."""
        assert self._folder is not None
        return self._folder

    async def connect(self, client: SGLangClient) -> None:
        """Needs nothing."""

    async def send(self, client: SGLangClient, *, flush_cache: bool) -> tuple[bool, str]:
        """Makes the server read the newest checkpoint; see `Transport`."""
        return await client.update_weights(str(self.folder()), self._version, flush_cache=flush_cache)

    async def close(self, client: SGLangClient | None) -> None:
        """Removes the checkpoints."""
        self._publisher.close()
