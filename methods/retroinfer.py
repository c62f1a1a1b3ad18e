"""RetroInfer (Chen et al., PVLDB 19(5)): clusters of keys, of which the best are read and the next
best estimated (https://github.com/microsoft/RetrievalAttention, cache_hub/retroinfer_cache.py and
kmeans.py).

The device keeps of a cluster its mean key (the centroid), the sum of its values, and its number of
tokens n. K-means starts at even distances, so that a prompt has the same clusters in any batch. Its
last round assigns among the centroids of all segments.

The rule, and where it differs (made into docs/methods.md):

**retroinfer** reads the `num_sinks` (4) first tokens and the last ones, `recent_frac` (0.5 %) of
the prompt. Between them, keys are clustered in each KV head: centred, in segments of `segment`
(8,192) tokens, about `cluster_size` (16) to a cluster, in `iterations` (10) rounds of k-means by
the largest product with normalised means, the last without. Clusters are ranked by the sum over the
group of the softmax over their centroids c. The tokens of the best `retrieval_frac` (1.8 %) of the
clusters are read; the next best `estimation_frac` (23.2 %) add n e^(q · c) to the denominator of
the attention and e^(q · c) · (sum of values) to its numerator; the others nothing. When
`update_frac` (0.78 %) of the prompt's number of tokens have left the last ones, they are clustered,
too, a cluster's at least.

- Clusters differ in size, so the data decides how many tokens are read. `budget=` and
  `method.budget` fix that number: clusters are read in their order, the last one in part, and what
  is left of it is estimated at the cluster's mean value.
- The official code's 64 last tokens and updates of 1,024, made for prompts of 128k, are shares
  here: of a prompt of 960 tokens they would be all that is read at 10 %.
- In the official code (microsoft/RetrievalAttention, newest version) the numbers of clusters, of
  segments, and of clusters read and estimated are rounded to the nearest, where they are rounded
  down here. The number of clusters is that of the whole prompt and a multiple of lcm(8, segments)
  for its kernel. Each update adds its share to the clusters read, at least one; here the share is
  of all clusters so far. A prompt below 1,092 tokens has full attention until 1,024 tokens are
  outside the first and last ones; here every prompt is clustered.
- A centroid without keys shrinks by a thousandth a round, so that it never ties with an equal one.
  First and last tokens, which the official code holds on the GPU, count as read. The prompt must be
  longer than they are.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple, Self

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad

from methods.base import (
    EMPTY,
    Calibration,
    Geometry,
    Lengths,
    Method,
    PromptRows,
    QueryRows,
    Rest,
    Selection,
    State,
    TokenCounts,
    floor_frac,
    require,
    share_above,
)
from methods.settings import least, setting, share

SHRINK = 0.999
"""Factor of a centroid without keys in each round. It may have found the keys of an
equal one, and rounding would decide between both; the official code lets it."""
SIZE_BITS = 32
"""Bits of a cluster's number of tokens. An element of a key counts 16."""
KEYS_AT_ONCE = 8192
"""Keys that are assigned to centroids together: their products are held."""


class Clusters(NamedTuple):
    """The clusters of some tokens. centroids, value_sums: fp32 [..., count, size]; sizes: [...,
    count], tokens of each; members: int64 [..., tokens], the cluster of each token."""

    centroids: Tensor
    value_sums: Tensor
    sizes: Tensor
    members: Tensor


class RetroInferState(State):
    """Clusters are numbered: first those of the prompt, in a padded batch as many as the longest
    prompt has, then those of each update. A row sees the clusters that were made before its own
    token came.

    By layer: centroids, value_sums: [batch, num_kv_heads, clusters, size]. sizes: int32 [batch,
    num_kv_heads, clusters], 0 for an empty one. cluster: int [batch, num_kv_heads, slots], number
    of each token's cluster, -1 for none yet.

    Where there will be updates, the tokens that are in no cluster yet, without the first ones:
    recent_keys, recent_values: [batch, num_kv_heads, room, size]; recent_slots: int64 [batch,
    room], with room for `num_recent` and `update` of the longest prompt. seen: int64 [batch],
    tokens so far.
    """

    sequence_tensors = (
        "centroids", "value_sums", "sizes", "recent_keys", "recent_values", "recent_slots", "seen"
    )  # fmt: skip
    slot_tensors = {"cluster": -1}
    centroids: dict[int, Tensor]
    value_sums: dict[int, Tensor]
    sizes: dict[int, Tensor]
    cluster: dict[int, Tensor]
    recent_keys: dict[int, Tensor]
    recent_values: dict[int, Tensor]
    recent_slots: dict[int, Tensor]
    seen: dict[int, Tensor]

    def start(self, calibration: Calibration | None) -> None:
        method, (prompts, finals) = self.method, (part.tolist() for part in self.lengths)
        self.prompts = prompts  # of the batch that is prefilled; a fork comes later
        self.update_sizes = sorted({method.update(prompt) for prompt in prompts})
        self.most_of_prompt = max(method.num_clusters(prompt) for prompt in prompts)
        self.most_of_updates = max(
            (final - prompt) // method.update(prompt) * method.clusters_of_update(prompt)
            for prompt, final in zip(prompts, finals, strict=True)
        )
        generated = {final - prompt for prompt, final in zip(prompts, finals, strict=True)}
        self.is_even = len(generated) == 1  # so are all sequences of a decode step

    def prompt(
        self, layer: int, query: Tensor, key: Tensor, value: Tensor, rows: PromptRows
    ) -> None:
        method, columns = self.method, key.shape[2]
        count = self.most_of_prompt + self.most_of_updates
        self.num_columns = columns
        number_type = torch.int16 if count < 2**15 else torch.int32
        self.cluster[layer] = torch.full(
            (*key.shape[:2], rows.num_slots), -1, dtype=number_type, device=key.device
        )
        self.centroids[layer] = key.new_zeros(*key.shape[:2], count, key.shape[-1])
        self.value_sums[layer] = value.new_zeros(*key.shape[:2], count, value.shape[-1])
        self.sizes[layer] = self.cluster[layer].new_zeros(
            (*key.shape[:2], count), dtype=torch.int32
        )
        if self.most_of_updates:
            room = max(map(method.num_recent, self.prompts)) + self.update_sizes[-1]
            self.recent_keys[layer] = key.new_zeros(*key.shape[:2], room, key.shape[-1])
            self.recent_values[layer] = value.new_zeros(*key.shape[:2], room, value.shape[-1])
            self.recent_slots[layer] = self.lengths.prompt.new_zeros(len(key), room)
            self.seen[layer] = self.lengths.prompt.clone()
        for at, prompt in enumerate(self.prompts):  # each alone: no other decides its clusters
            recent = method.num_recent(prompt)
            stop = columns - recent
            middle = slice(columns - prompt + method.num_sinks, stop)
            number, segments = method.num_clusters(prompt), method.num_segments(prompt)
            own = key[at : at + 1, :, middle], value[at : at + 1, :, middle]
            found = clustered(*own, number, segments, method.iterations)
            self.centroids[layer][at, :, :number] = found.centroids[0].to(key.dtype)
            self.value_sums[layer][at, :, :number] = found.value_sums[0].to(value.dtype)
            self.sizes[layer][at, :, :number] = found.sizes[0]
            self.cluster[layer][at, :, middle] = found.members[0].to(number_type)
            if self.most_of_updates:
                self.recent_keys[layer][at, :, :recent] = key[at, :, stop:]
                self.recent_values[layer][at, :, :recent] = value[at, :, stop:]
                self.recent_slots[layer][at, :recent] = torch.arange(
                    stop, columns, device=key.device
                )

    def append(
        self, layer: int, key: Tensor, value: Tensor, positions: Tensor, slots: slice | Tensor
    ) -> None:
        assert isinstance(slots, slice), "the state is not replayable"
        if not self.most_of_updates:
            return
        size = self.update_sizes[0]  # so that no piece completes two updates
        for first in range(0, key.shape[2], size):
            part = slice(first, first + size)
            self._append(
                layer, key[:, :, part], value[:, :, part], positions[:, part], slots.start + first
            )

    def _append(
        self, layer: int, key: Tensor, value: Tensor, positions: Tensor, first_slot: int
    ) -> None:
        """Put tokens behind the recent ones, and cluster the oldest of these if enough have left
        the last ones."""
        num_rows, real, kept = key.shape[2], positions != EMPTY, self.recent_slots[layer].shape[-1]
        done = self._updates(self.seen[layer])
        first_recent = self._first_recent(done)[:, None]
        room = kept + num_rows
        place = (positions - first_recent).masked_fill(~real, room)  # padding goes to a dump behind
        slots = torch.arange(first_slot, first_slot + num_rows, device=key.device).expand_as(place)

        def put(recent: Tensor, rows: Tensor, index: Tensor) -> Tensor:
            return pad(recent, (0, 0, 0, num_rows + 1)).scatter_(-2, index.expand_as(rows), rows)

        keys = put(self.recent_keys[layer], key, place[:, None, :, None])
        values = put(self.recent_values[layer], value, place[:, None, :, None])
        recent_slots = self.recent_slots[layer].unsqueeze(-1)
        numbers = put(recent_slots, slots.unsqueeze(-1), place.unsqueeze(-1)).squeeze(-1)
        self.seen[layer] = self.seen[layer] + real.sum(-1)
        due = self._updates(self.seen[layer]) > done
        if self._may_be_due(due, num_rows, first_slot):
            update = self._update_size()
            for size in self.update_sizes:
                due_now = due & (update == size)
                self._update(layer, keys, values, numbers, done, due_now, size)
                keys = torch.where(_along(due_now, keys), keys.roll(-size, 2), keys)
                values = torch.where(_along(due_now, values), values.roll(-size, 2), values)
                numbers = torch.where(due_now[:, None], numbers.roll(-size, 1), numbers)
        self.recent_keys[layer] = keys[:, :, :kept].clone()
        self.recent_values[layer] = values[:, :, :kept].clone()
        self.recent_slots[layer] = numbers[:, :kept].clone()

    def _may_be_due(self, due: Tensor, num_rows: int, first_slot: int) -> bool:
        """True if any sequence may need an update. A decode step on a GPU counts columns instead of
        asking the device."""
        if due.device.type == "cpu" or num_rows > 1 or not self.is_even:
            return bool(due.any())
        generated = first_slot + 1 - self.num_columns
        return any(generated % size == 0 for size in self.update_sizes)

    def _update(
        self,
        layer: int,
        keys: Tensor,
        values: Tensor,
        slots: Tensor,
        done: Tensor,
        due: Tensor,
        size: int,
    ) -> None:
        """Cluster the first `size` of the recent tokens of the sequences that are due."""
        method = self.method
        oldest, count = slice(0, size), size // method.cluster_size
        found = clustered(keys[:, :, oldest], values[:, :, oldest], count, 1, method.iterations)
        first = (self.most_of_prompt + done * count).clamp(max=self.sizes[layer].shape[-1] - count)
        numbers = first[:, None, None] + torch.arange(count, device=keys.device)
        where = slots[:, None, oldest].expand(-1, keys.shape[1], -1)
        for held, index, new in (
            (self.centroids[layer], numbers, found.centroids),
            (self.value_sums[layer], numbers, found.value_sums),
            (self.sizes[layer], numbers, found.sizes),
            (self.cluster[layer], where, first[:, None, None] + found.members),
        ):
            index = index.expand(-1, keys.shape[1], -1)
            index = index if held.dim() == 3 else index.unsqueeze(-1).expand_as(new)
            kept = held.gather(2, index)
            held.scatter_(2, index, torch.where(_along(due, held), new.to(held.dtype), kept))

    def _updates(self, cached: Tensor) -> Tensor:
        """Updates before the next token comes, int; cached: int [batch] or [batch, rows], tokens
        before it."""
        prompt, update = _along(self.lengths.prompt, cached), _along(self._update_size(), cached)
        return ((cached - prompt) // update).clamp(min=0)

    def _first_recent(self, done: Tensor) -> Tensor:
        """First token behind those in clusters, after so many updates."""
        first = self.lengths.prompt - self._num_recent()
        return _along(first, done) + done * _along(self._update_size(), done)

    def _num_recent(self) -> Tensor:
        """`RetroInfer.num_recent` of each sequence, int [batch]."""
        return floor_frac(self.method.recent_frac, self.lengths.prompt).clamp(min=1)

    def _update_size(self) -> Tensor:
        """`RetroInfer.update` of each sequence, int [batch]."""
        method = self.method
        return floor_frac(method.update_frac, self.lengths.prompt).clamp(min=method.cluster_size)

    def select(self, layer: int, rows: QueryRows) -> Selection:
        method, sizes, softmax = self.method, self.sizes[layer], self.geometry.softmax(layer)
        positions = rows.positions.long()
        done = self._updates(positions)
        number = torch.arange(sizes.shape[-1], device=sizes.device)
        made = done * (self._update_size() // method.cluster_size)[:, None]
        seen = number < self.most_of_prompt + made[:, None, :, None]
        sizes_of_rows = sizes.unsqueeze(2) * seen  # [batch, kv, rows, clusters]
        scores = softmax.scores(rows.query, self.centroids[layer])
        scores = scores.masked_fill((sizes_of_rows == 0).unsqueeze(2), -torch.inf)
        order = scores.log_softmax(-1).logsumexp(2).argsort(dim=-1, descending=True, stable=True)
        ordered = sizes_of_rows.gather(-1, order)
        in_middle = (self.lengths.prompt - method.num_sinks - self._num_recent())[:, None]
        segments = (in_middle // method.segment).clamp(min=1)
        in_segment = (in_middle // segments // method.cluster_size).clamp(min=1)
        num_clusters = segments * in_segment + made  # as `RetroInfer.num_clusters`
        read, estimated = self._zones(ordered, num_clusters, positions, self._first_recent(done))
        read = torch.zeros_like(read).scatter_(-1, order, read)
        estimated = torch.zeros_like(estimated).scatter_(-1, order, estimated)
        mask = self._tokens(layer, rows, read, self._first_recent(done))
        logits = scores + estimated.float().log().unsqueeze(2)
        log_mass = logits.logsumexp(-1)
        weights = (logits - log_mass.unsqueeze(-1)).exp().nan_to_num(0.0)  # nothing is estimated
        means = self.value_sums[layer].float() / sizes.clamp(min=1).unsqueeze(-1)
        rest = Rest(None, weights @ means.unsqueeze(2), log_mass)
        side = self._index_read(num_clusters, (estimated > 0).sum(-1).double().mean(1))
        return Selection(mask, mask.sum(-1).double().mean(1), side, rest=rest)

    def _zones(
        self, sizes: Tensor, number: Tensor, positions: Tensor, first_recent: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Tokens of each cluster that are read and that are estimated, shaped like `sizes`, [batch,
        num_kv_heads, rows, clusters], best first. number: clusters, int [batch, rows]."""
        method, rank = self.method, torch.arange(sizes.shape[-1], device=sizes.device)
        number = number.unsqueeze(1)  # [batch, 1, rows]
        if method.budget is None:
            best = floor_frac(method.retrieval_frac, number).clamp(min=1).unsqueeze(-1)
            read = sizes * (rank < best)
            stop = floor_frac(method.retrieval_frac + method.estimation_frac, number).unsqueeze(-1)
        else:
            steady = positions - first_recent + method.num_sinks
            free = (floor_frac(method.budget, positions) - steady).clamp(min=1)[:, None, :, None]
            read = (free - (sizes.cumsum(-1) - sizes)).clamp(min=0).minimum(sizes)
            stop = (read > 0).sum(-1, keepdim=True) + floor_frac(
                method.estimation_frac, number
            ).unsqueeze(-1)
        return read, (sizes - read) * (rank < stop)

    def _tokens(self, layer: int, rows: QueryRows, read: Tensor, first_recent: Tensor) -> Tensor:
        """The slots of the tokens that are read, by how many of each cluster are: bool [batch,
        num_kv_heads, rows, slots]. Of a cluster that is read in part the first ones are."""
        slots = rows.slot_positions.shape[-1]
        cluster = self.cluster[layer][:, :, :slots].clamp(min=0).long()
        read_of_cluster = read.gather(-1, cluster.unsqueeze(2).expand(-1, -1, read.shape[2], -1))
        chosen = read_of_cluster >= self.sizes[layer].gather(-1, cluster).unsqueeze(2)
        token = rows.slot_positions.unsqueeze(2)
        in_clusters = (token >= self.method.num_sinks) & (token < first_recent[:, None, :, None])
        if self.method.budget is not None:
            cut = (read_of_cluster > 0) & ~chosen & in_clusters
            chosen |= cut & (cut.cumsum(-1) <= read_of_cluster)
        return rows.visible() & (chosen | ~in_clusters)

    def _index_read(self, number: Tensor, estimated: Tensor) -> Tensor:
        """Centroids and sizes of all clusters, and value sums of those estimated, in tokens."""
        value_dim = self.geometry.value_dim or self.geometry.head_dim
        cluster_size = self.geometry.head_dim + SIZE_BITS / 16
        return (number * cluster_size + estimated * value_dim) / self.geometry.elements


@dataclass(frozen=True)
class RetroInfer(Method):
    """Defaults are the official code's, which rounds counts to the nearest where this rounds them
    down, but for the last tokens and updates.

    With `budget` the last cluster is read in part, and its other tokens are estimated. First
    and last tokens count in it.

    Source: RetroInfer (PVLDB 19)
    Keeps: every token; centroids of clusters of keys, and the sums of their values
    Reads: the clusters with the best centroids; the next best are estimated
    """

    retrieval_frac: float = setting(
        0.018, "share of the clusters whose tokens are read, at least one", share()
    )
    estimation_frac: float = setting(
        0.232, "share of the clusters, the next best, that are estimated", share(zero=True)
    )
    budget: float | None = setting(
        None,
        "share of the cached tokens that are read; null: retrieval_frac says it, clusters whole",
        share(null=True),
    )
    num_sinks: int = setting(4, "first tokens, in no cluster and always read", least(0))
    recent_frac: float = setting(
        0.005,
        "share of the prompt, its last tokens: in no cluster and always read, at least one",
        share(zero=True),
    )
    cluster_size: int = setting(16, "tokens of a cluster, in the mean", least(1))
    segment: int = setting(8192, "tokens that are clustered together", least(1))
    iterations: int = setting(10, "rounds of k-means", least(1))
    update_frac: float = setting(
        0.0078,
        "share of the prompt: tokens behind it that are clustered at once, at least cluster_size",
        share(zero=True),
    )

    weighs_rest = True

    title = "RetroInfer"
    state = RetroInferState
    when = "own_query"

    def __post_init__(self) -> None:
        super().__post_init__()
        whole_clusters = f"an integer >= {self.cluster_size}"
        require(self.segment >= self.cluster_size, "segment", self.segment, whole_clusters)

    def num_recent(self, prompt: int) -> int:
        """Last tokens of a prompt that are in no cluster."""
        return max(1, int(self.recent_frac * prompt))

    def update(self, prompt: int) -> int:
        """Tokens behind a prompt that are clustered at once."""
        return max(self.cluster_size, int(self.update_frac * prompt))

    def clusters_of_update(self, prompt: int) -> int:
        """Clusters that an update makes."""
        return self.update(prompt) // self.cluster_size

    def num_clustered(self, prompt: int) -> int:
        """Tokens of a prompt that are in clusters."""
        return prompt - self.num_sinks - self.num_recent(prompt)

    def num_segments(self, prompt: int) -> int:
        """Segments of a prompt."""
        return max(1, self.num_clustered(prompt) // self.segment)

    def num_clusters(self, prompt: int) -> int:
        """Clusters of a prompt: as many in each segment."""
        segments = self.num_segments(prompt)
        return segments * max(1, self.num_clustered(prompt) // segments // self.cluster_size)

    def check(self, geometry: Geometry, lengths: Lengths) -> None:
        """ValueError where a prompt has no token between the first and the last ones."""
        self._require_clusters(int(lengths.prompt.min()))

    def _require_clusters(self, prompt: int) -> None:
        below = prompt - self.num_recent(prompt)
        allowed = f"below {below}, so that a prompt of {prompt} tokens has clusters"
        require(self.num_clustered(prompt) > 0, "num_sinks", self.num_sinks, allowed)

    def steady(self, counts: TokenCounts) -> int:
        """Tokens that are in no cluster, which a row reads always."""
        waiting = (counts.cached - counts.prompt) % self.update(counts.prompt)
        return self.num_sinks + self.num_recent(counts.prompt) + waiting

    def tokens_read(self, counts: TokenCounts, layer: int) -> float | None:
        return None if self.budget is None else self.max_tokens_read(counts, layer)

    def max_tokens_read(self, counts: TokenCounts, layer: int) -> int:
        """A cluster may hold any number of tokens."""
        if self.budget is None:
            return counts.cached
        return min(counts.cached, max(self.steady(counts) + 1, int(self.budget * counts.cached)))

    def with_budget(self, frac: float) -> Self:
        return replace(self, budget=frac)

    def min_budget(self, counts: TokenCounts) -> float:
        """The least share that reads a token of a cluster at the first row."""
        self._require_clusters(counts.prompt)
        always = self.num_sinks + self.num_recent(counts.prompt)
        return share_above(always, counts.prompt)


def _along(numbers: Tensor, like: Tensor) -> Tensor:
    """A number of each sequence [batch] with the axes of `like` [batch, ...]."""
    return numbers.view(-1, *[1] * (like.dim() - 1))


# Clusters


def clustered(
    key: Tensor, value: Tensor, count: int, num_segments: int, iterations: int
) -> Clusters:
    """Cluster tokens, key and value [..., tokens, size], of each head; `count` clusters, as many in
    each segment."""
    mean = key.float().mean(-2, keepdim=True)
    points, num_tokens = key.float() - mean, key.shape[-2]
    starts = (2 * torch.arange(count, device=key.device) + 1) * num_tokens // (2 * count)
    centroids = points[..., starts, :]
    length, segment_count = num_tokens // num_segments, count // num_segments
    for segment in range(num_segments):
        own = points[..., segment * length : (segment + 1) * length, :]
        part = slice(segment * segment_count, (segment + 1) * segment_count)
        for _ in range(iterations - 1):
            _, belongs = nearest(own, centroids[..., part, :])
            direction = normalize(belongs.mT @ own, dim=-1)
            is_any = (belongs.sum(-2) > 0).unsqueeze(-1)
            others = SHRINK * centroids[..., part, :]
            centroids[..., part, :] = torch.where(is_any, direction, others)
    members: list[Tensor] = []
    sizes = torch.zeros(centroids.shape[:-1], device=key.device)
    key_sums = torch.zeros_like(centroids)
    value_sums = torch.zeros(*centroids.shape[:-1], value.shape[-1], device=key.device)
    parts = points.split(KEYS_AT_ONCE, -2), value.float().split(KEYS_AT_ONCE, -2)
    for keys, values in zip(*parts, strict=True):
        numbers, belongs = nearest(keys, centroids)
        members.append(numbers)
        sizes += belongs.sum(-2)
        key_sums += belongs.mT @ keys
        value_sums += belongs.mT @ values
    num_members = sizes.unsqueeze(-1)
    centroids = torch.where(num_members > 0, key_sums / num_members.clamp(min=1), centroids)
    return Clusters(centroids + mean, value_sums, sizes, torch.cat(members, -1))


def nearest(points: Tensor, centroids: Tensor) -> tuple[Tensor, Tensor]:
    """The centroid [..., count, size] with the largest product with each of `points` [..., n,
    size]: its number int64 [..., n], and whether each is it, fp32 [..., n, count]."""
    products = points @ centroids.mT
    numbers = products.argmax(-1)
    return numbers, products.zero_().scatter_(-1, numbers.unsqueeze(-1), 1.0)
