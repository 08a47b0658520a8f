"""A recorded decision, read again: each candidate of its row, and what would make the Pod placeable. Pure.

The row holds no times, so when a place is free again is told by the blocks as they are now. A row may come
from another version: what is not known of it is left out, never guessed.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from decimal import Decimal

from app.api import keys
from app.api.quantities import usd
from app.api.reasons import PLACED_CONDITION, DeferralReason, SkipReason
from app.placement.explain import PLACED, WORDS
from app.store.blocks import Block
from app.store.decisions import Decision

CHOSEN = "chosen"
NEXT = "next"  # it could be tried as well, after the chosen one
_WORDS = {reason.value: words for reason, words in WORDS.items()}


@dataclass(frozen=True, slots=True, kw_only=True)
class Looked:
    """One candidate of a decision. ``skip`` None: it could be tried. ``region`` None: the whole provider.

    ``blocks``: those that held it back, as they are now, the latest end first; those already forgotten are
    not there.
    """

    provider: str
    account: str
    region: str | None
    tier: str
    usd_per_hour: Decimal | None
    skip: str | None
    detail: str
    chosen: bool = False
    for_good: bool = False
    blocks: tuple[Block, ...] = ()

    @property
    def verdict(self) -> str:
        """In words: ``chosen``, ``next``, ``too dear``."""
        if self.skip is None:
            return CHOSEN if self.chosen else NEXT
        return _WORDS.get(self.skip, self.skip)

    @property
    def until(self) -> datetime | None:
        """When the last of its blocks lapses or has lapsed."""
        return max((block.expires_at for block in self.blocks), default=None)

    @property
    def seller(self) -> str:
        return self.provider if self.account == keys.DEFAULT_ACCOUNT else f"{self.provider}/{self.account}"

    def __str__(self) -> str:
        return " ".join(part for part in (self.seller, self.tier, self.region) if part)


def block_ids(decision: Decision) -> list[int]:
    """The rows of blocks that held back candidates."""
    return sorted({row for place in decision.candidates for row in place.get("blocks", ())})


def looked(decision: Decision, *, blocks: Iterable[Block]) -> list[Looked]:
    """The candidates in the order of trying. ``blocks`` must hold those of `block_ids` that there are."""
    known = {block.id: block for block in blocks}
    found: list[Looked] = []
    for place in decision.candidates:
        met = [known[row] for row in place.get("blocks", ()) if row in known]
        price, skip = place.get("price"), place.get("skip")
        first = skip is None and all(earlier.skip is not None for earlier in found)
        found.append(
            Looked(
                provider=place["provider"],
                account=place["account"],
                region=place["region"],
                tier=place["tier"],
                usd_per_hour=None if price is None else Decimal(price),
                skip=skip,
                detail=place.get("detail") or "",
                chosen=first and decision.outcome == PLACED,
                for_good=bool(place.get("for_good")),
                blocks=tuple(sorted(met, key=lambda block: (block.expires_at, block.id), reverse=True)),
            )
        )
    return found


def remedies(
    decision: Decision, places: Sequence[Looked], *, now: datetime, relative: Callable[[datetime], str]
) -> list[str]:
    """One sentence for each thing that would help, what waiting alone ends first; none for a placed Pod.

    ``now`` is the database's time, and ``relative`` says a moment in words.
    """
    if decision.outcome == PLACED:
        return []
    if not places:
        return [_without_places(decision)]
    ways = _Ways(decision=decision, now=now, relative=relative)
    by_reason: dict[str, list[Looked]] = {}
    for place in places:
        if place.skip is not None:
            by_reason.setdefault(place.skip, []).append(place)
    order = sorted(by_reason, key=lambda reason: reason != SkipReason.BLOCKED)  # stable
    return [line for reason in order for line in dict.fromkeys(ways.of(reason, by_reason[reason]))]


def _without_places(decision: Decision) -> str:
    where = f"-n {decision.pod_namespace} {decision.pod_name}"
    words = "see above"
    if not decision.message:  # a row of an older version
        words = f"kubectl get pod {where} -o yaml says in condition {PLACED_CONDITION}"
    pool = decision.pool
    by_outcome: dict[str, str] = {
        DeferralReason.NO_POOL: (
            f"the label {keys.NODE_POOL_LABEL} must name a NodePool that exists and is not being deleted"
            " (kubectl get nodepools)"
        ),
        DeferralReason.INVALID_REQUEST: f"the Pod must be made anew, corrected ({words})",
        DeferralReason.NO_CANDIDATE: f"NodePool {pool} must be corrected ({words})",
        DeferralReason.STALE_CLAIM: (
            "the claim of an earlier Pod must be released, which happens by itself while its provider answers"
            " (kubectl get nodeclaims)"
        ),
        DeferralReason.OWNER_BACKOFF: (
            f"waiting: its owner's Pods end by themselves again and again ({words})"
        ),
    }
    return by_outcome.get(decision.outcome, f"waiting ({words})")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Ways:
    decision: Decision
    now: datetime
    relative: Callable[[datetime], str]

    @property
    def pool(self) -> str:
        return f"NodePool {self.decision.pool}"

    def of(self, reason: str, places: list[Looked]) -> list[str]:
        """The sentences for all places that were passed over for one reason."""
        match reason:
            case SkipReason.BLOCKED:
                return [self._blocked(places)]
            case SkipReason.PRICE:
                return self._dear(places)
            case SkipReason.LIMIT:
                return self._over(places)
            case SkipReason.BUDGET:
                return [f"another period begins, or the budget is raised: {places[0].detail}"]
            case SkipReason.NODE_UNAVAILABLE:
                return [self._node(place) for place in places]
            case SkipReason.ACCELERATOR_UNSUPPORTED:
                return self._unsold(places)
            case SkipReason.NAMESPACE_NOT_ALLOWED:
                namespace = self.decision.pod_namespace
                return [f"label namespace {namespace} so that {self.pool}'s namespaceSelector selects it"]
            case SkipReason.PROVIDER_UNREGISTERED:
                return [
                    f"configure {place.seller} (nebula run --providers), or take it off {self.pool}"
                    for place in places
                ]
            case SkipReason.CAPACITY_TYPE_UNSUPPORTED:
                return [f"add another capacityType to {self.pool} ({_told(places)})"]
            case SkipReason.EGRESS_POLICY_UNSUPPORTED:
                return [f"open {self.pool}'s egress, or add a provider that can enforce it ({_told(places)})"]
            case SkipReason.LIFETIME:
                return [
                    f"lower the Pod's activeDeadlineSeconds, or add a provider whose machines live longer"
                    f" ({_told(places)})"
                ]
            case SkipReason.COMPLETION:
                return [f"add a provider that tells how work ends to {self.pool} ({_told(places)})"]
            case SkipReason.REQUEST_UNSUPPORTED:
                return [f"change the Pod, or add a provider that can run it ({_told(places)})"]
        return [f"end what holds back {_told(places)}"]

    def _blocked(self, places: list[Looked]) -> str:
        if over := [place for place in places if place.until is not None and place.until <= self.now]:
            return f"nothing: the block on {over[0]} is over, and the Pod is about to be looked at again"
        soonest = min(places, key=lambda place: (place.until is None, place.until or self.now))
        if soonest.until is None:  # what only this Pod avoids, or a row of an older version
            return f"waiting: {soonest} ({soonest.detail}) is tried again by itself"
        ids = " ".join(str(block.id) for block in soonest.blocks if block.expires_at > self.now)
        return (
            f"waiting: {soonest} ({soonest.detail}) is tried again {self.relative(soonest.until)};"
            f" sooner with: nebula blocks clear {ids}"
        )

    def _dear(self, places: list[Looked]) -> list[str]:
        """For each ceiling, what it must be at least: the cheapest place that it shut out."""
        by_ceiling: dict[str, list[Looked]] = {}
        for place in places:
            by_ceiling.setdefault(place.detail.rpartition(" by ")[2], []).append(place)
        lines = []
        for ceiling, shut_out in by_ceiling.items():
            priced = [(place.usd_per_hour, place) for place in shut_out if place.usd_per_hour is not None]
            if priced:
                price, place = min(priced, key=lambda pair: pair[0])
                lines.append(f"raise {ceiling} to at least {usd(price)} an hour, the price of {place}")
            else:
                lines.append(f"a known price of {_names(shut_out)} within {ceiling}, or no such ceiling")
        return lines

    def _over(self, places: list[Looked]) -> list[str]:
        """The limit in GPUs stands alone; of the one in dollars only the cheapest place matters."""
        gpus = [place for place in places if "limits.gpus" in place.detail]
        dollars = [place for place in places if place not in gpus]
        dollars.sort(key=lambda place: (place.usd_per_hour is None, place.usd_per_hour or 0))
        lines = []
        for place in (*gpus[:1], *dollars[:1]):
            if place.for_good or "less than one machine" in place.detail:
                way = f"raise the limit of {self.pool}, or take it off"
            elif "its price is not known" in place.detail:
                way = f"a known price, or no limits.usdPerHour on {self.pool}"
            else:  # unpriced machines, too, leave room when they end
                way = f"a Pod of {self.pool} ends, or its limit is raised"
            lines.append(f"{way}: {place.detail}")
        return lines

    def _node(self, place: Looked) -> str:
        node = keys.node_name(place.provider, place.account)
        if place.detail.endswith(" is cordoned"):
            return f"kubectl uncordon {node}"
        if place.detail.endswith(" is not Ready"):
            return f"node {node} becomes Ready: kubectl describe node {node} says why it is not"
        if place.detail.endswith(" does not exist"):
            return f"node {node} exists: the controller makes it once it has reached {place.seller}"
        return f"change the Pod or the node: {place.detail}"

    def _unsold(self, places: list[Looked]) -> list[str]:
        lines = []
        if silent := [place for place in places if not place.for_good]:
            lines.append(f"waiting: {_names(silent)} must tell its offers first")
        if without := [place for place in places if place.for_good]:
            lines.append(
                f"ask for another accelerator or count, or add a provider or region that offers it to"
                f" {self.pool} ({_told(without)})"
            )
        return lines


def _names(places: Sequence[Looked]) -> str:
    return ", ".join(dict.fromkeys(str(place) for place in places))


def _told(places: Sequence[Looked]) -> str:
    """What was said of the first, and of how many more."""
    first, more = places[0], len(places) - 1
    said = f"{first}: {first.detail}" if first.detail else str(first)
    return f"{said}; and {more} more" if more else said
