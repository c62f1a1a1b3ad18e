"""Batches of requests in replay: prompts padded left and run once, then forked to the branches that follow them."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from harness.accuracy.requests import AnyRequest, Branch, SharedContext
from harness.model.attach import Attached
from harness.replay import ReplaySession

CACHE_TOKENS = 8192
"""Sequences times columns decoded at once: 0.4 GB of cache in fp32 on the default model, 4 GB in fp16 on
Llama-2-7B."""

Item = TypeVar("Item")
OpenSession = Callable[[Tensor, int], ReplaySession]
"""Makes a fresh session from final lengths, int [batch], and a number of columns."""


class PromptBatch:
    """A batch of prompts after their prefill, whose branches are decoded slice by slice.

    root: the session of the prompts; its `reads` are those of the prefill.
    """

    def __init__(
        self,
        prompts: Sequence[SharedContext],
        requests: Sequence[AnyRequest],
        attached: Attached,
        open_session: OpenSession,
    ) -> None:
        self.requests = requests
        self.device = attached.device
        self.branches = [(parent, branch) for parent, prompt in enumerate(prompts) for branch in prompt.branches]
        self.final_lengths = self._tensor([prompt.final_length for prompt in prompts])
        ids, valid = pad([prompt.ids for prompt in prompts], self.device, left=True)
        self.num_columns = ids.shape[1]
        self.root = open_session(self.final_lengths, self.num_columns)
        counts = self._tensor([sum(len(branch.requests) for branch in prompt.branches) for prompt in prompts])
        self.last_hidden = self.root.prefill(ids, valid, counts)[:, -1:]  # [prompts, 1, hidden_size]

    def slices(self) -> Iterator[list[tuple[int, Branch]]]:
        """The branches, each with its prompt's place in the batch, in slices of bounded memory."""

        def size(item: tuple[int, Branch]) -> tuple[int, int]:
            members = [self.requests[index] for index in item[1].requests]
            own = sum(len(request.rows) > len(item[1].shared) for request in members)
            return max(1, own), self.num_columns + max(request.num_rows for request in members)

        yield from batches(self.branches, size, CACHE_TOKENS)

    def decode_shared(
        self, branches: Sequence[tuple[int, Branch]], more_columns: int = 0
    ) -> tuple[ReplaySession, Tensor]:
        """Fork the prompts to `branches` and decode the rows that each one's requests share.

        more_columns: room for rows that follow. Returns the session, which has read these rows only, and hidden states
        [branches, 1 + longest, hidden_size], the prompt's last row before the shared ones.
        """
        parents = self._tensor([parent for parent, _ in branches])
        shared, valid = pad([branch.shared for _, branch in branches], self.device)
        session = self.root.fork(parents, self.num_columns + shared.shape[1] + more_columns)
        hidden = [self.last_hidden[parents]]
        if shared.shape[1]:
            counts = self._tensor([len(branch.requests) for _, branch in branches])
            hidden.append(session.decode(shared, valid, counts))
        return session, torch.cat(hidden, 1)

    def _tensor(self, values: list[int]) -> Tensor:
        return torch.tensor(values, device=self.device)


def batches(items: Iterable[Item], size: Callable[[Item], tuple[int, int]], most: int) -> Iterator[list[Item]]:
    """Runs of items whose sequences times columns stay within `most`, of at least one item; size: (sequences,
    columns)."""
    batch: list[Item] = []
    count = width = 0
    for item in items:
        sequences, columns = size(item)
        if batch and (count + sequences) * max(width, columns) > most:
            yield batch
            batch, count, width = [], 0, 0
        batch.append(item)
        count, width = count + sequences, max(width, columns)
    if batch:
        yield batch


def pad(sequences: Sequence[Sequence[int]], device: torch.device, *, left: bool = False) -> tuple[Tensor, Tensor]:
    """Ids int [batch, longest], 0 where padded, and where they are real, bool alike."""
    width = max(map(len, sequences))
    lengths = torch.tensor([len(sequence) for sequence in sequences])
    column = torch.arange(width)
    valid = column >= width - lengths[:, None] if left else column < lengths[:, None]
    ids = torch.zeros(valid.shape, dtype=torch.long)
    ids[valid] = torch.tensor([token for sequence in sequences for token in sequence], dtype=torch.long)
    return ids.to(device), valid.to(device)
