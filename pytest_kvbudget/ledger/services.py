"""Which boot of a stream a line belongs to: boots follow each other, and services that log together take turns."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pytest_kvbudget.ledger.assemble import assemble
from pytest_kvbudget.ledger.boot import BootState
from pytest_kvbudget.ledger.cut import Cutter
from pytest_kvbudget.ledger.model import BootLedger, Milestone
from pytest_kvbudget.ledger.prefix import Text
from pytest_kvbudget.ledger.quiet import Quiet
from pytest_kvbudget.ledger.scan import Kind
from pytest_kvbudget.verdict import Phase

MOST_BOOTS: Final = 1000
"""Earlier boots of a stream that are kept."""
MOST_SERVICES: Final = 64
"""Services whose boots are told apart."""
LONGEST_WAIT: Final = 64
"""Lines of other services among which the rest of a wrapped sentence may come."""


class Boot:
    """One boot of a stream."""

    def __init__(self, start: int, service: str | None) -> None:
        self.start = start
        """Its first line."""
        self.service = service
        """Who logged it, where the lines say so."""
        self.time: int | None = None
        """When it began, in seconds of the day, where its lines say so."""
        self.ended: BootLedger | None = None
        """What it said, where no further line can belong to it."""


class Service:
    """What one service logs: its boots, one after the other."""

    def __init__(self, boot: Boot, state: BootState) -> None:
        self.cutter = Cutter()
        self.waited = 0
        """Lines of others since it was in the middle of a sentence."""
        self.begin(boot, state)

    def begin(self, boot: Boot, state: BootState) -> None:
        """Another boot begins."""
        self.boot = boot
        self.state = state
        self.quiet = Quiet(state)


class Boots:
    """The boots of a stream. Most streams are of one service, or their lines name none."""

    def __init__(self, new_state: Callable[[], BootState]) -> None:
        self._new_state = new_state
        self._listed = [Boot(1, None)]
        self._now = Service(self._listed[0], new_state())
        """Who had the last line; so do lines of those that run no engine, the kernel's for example."""
        self._services = [self._now]
        self.quiets: tuple[Quiet, ...] = ()
        """Per service, what tells whether a line says nothing new."""
        self._changed()
        self._waiting: set[Service] = set()
        """Those in the middle of a sentence."""
        self._names: dict[str | None, Service] = {}
        """Those whose engine has shown itself."""
        self.forgotten = 0
        """Boots at the beginning of the stream that are not kept: beyond `MOST_BOOTS`, the oldest go."""

    @property
    def listed(self) -> tuple[Boot, ...]:
        """The boots, oldest first, less the `forgotten` ones."""
        return tuple(self._listed)

    @property
    def waits_for_more(self) -> bool:
        """A wrapped sentence is open: the next lines are needed whatever they contain."""
        return bool(self._waiting)

    @property
    def phase(self) -> Phase:
        """What the boot that began last is doing."""
        return max(self._services, key=lambda service: service.boot.start).state.now

    def ledger(self, boot: Boot, lines: int) -> BootLedger:
        """What a boot said so far, in a stream of that many ``lines``."""
        if boot.ended is not None:
            return boot.ended
        state = next(service.state for service in self._services if service.boot is boot)
        return assemble(state, lines - boot.start + 1)

    def of(self, line: int, text: Text, kind: Kind) -> Service:
        """Whose line it is; if it is the first of a boot, that boot has begun."""
        service = self._names.get(text.service) or self._unnamed(line, text, kind)
        if service.cutter.begins_boot(service.state, text, kind):
            service.boot.ended = assemble(service.state, line - service.boot.start)
            service.begin(self._list(line, text.service), self._new_state())
            self._waiting.discard(service)
            self._changed()
        self._now = service
        return service

    def take(self, line: int, text: Text, kind: Kind, *, partial: bool) -> list[Milestone]:
        """Read a line of the service that had the last one; returns the milestones that it shows for the first time."""
        service = self._now
        found = service.state.take(line, text, kind, partial=partial)
        if service.state.waits_for_more:
            self._waiting.add(service)
        elif self._waiting:
            self._waiting.discard(service)
        service.waited = 0
        for other in [other for other in self._waiting if other is not service]:
            other.waited += 1
            if other.waited > LONGEST_WAIT:
                other.state.wait_no_longer()
                self._waiting.discard(other)
        return found

    def source_ends(self, line: int) -> None:
        """What follows was logged elsewhere, perhaps by other services of the same engine."""
        for service in self._services:
            if service is not self._now:
                service.boot.ended = assemble(service.state, line - service.boot.start)
        self._services = [self._now]
        self._waiting &= {self._now}
        self._changed()
        self._names.clear()

    def _changed(self) -> None:
        self.quiets = tuple(service.quiet for service in self._services)

    def _unnamed(self, line: int, text: Text, kind: Kind) -> Service:
        service, named = self._now, bool(self._names)
        if (named and text.service is None) or not service.cutter.shows_engine(text, kind):
            return service
        if named and len(self._services) < MOST_SERVICES:
            service = Service(self._list(line, text.service), self._new_state())
            self._services.append(service)
            self._changed()
        elif not named:
            service.boot.service = text.service
        self._names[text.service] = service
        return service

    def _list(self, line: int, service: str | None) -> Boot:
        boot = Boot(line, service)
        self._listed.append(boot)
        if len(self._listed) > MOST_BOOTS + len(self._services):
            self.forgotten += 1
            self._listed.remove(next(known for known in self._listed if known.ended is not None))
        return boot
