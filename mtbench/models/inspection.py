"""The data of checkpoints without their weights, each read once: what planning needs."""

from collections.abc import Mapping
from contextlib import nullcontext, suppress

from mtbench.errors import UnreadableCheckpoint
from mtbench.models import families, gguf
from mtbench.models.drafts.loading import inspect_draft
from mtbench.models.loading import Inspected, inspect, refuse_undecodable


class Inspections:
    """The data of checkpoints, by source."""

    def __init__(self, *, offline: bool) -> None:
        self.offline = offline
        self._models: dict[str, Inspected] = {}
        self._decodable = set[str]()

    def of_roles(
        self, sources: Mapping[str, str], on: str, *, masked: bool, here: bool, served: bool
    ) -> dict[str, Inspected]:
        """Return the data of a target and its drafts by role, the target's first.

        `sources`: by role; `on`: the target's. masked: it must have a mask token. here: mtbench decodes them. served: a
        serving engine does, to which a draft is left that mtbench cannot read: it is not among them. Raises UserError
        if a checkpoint cannot be used.
        """
        target = self._model(sources[on], masked=masked, here=here)
        inspected = {on: target}
        for role, source in sources.items():
            if role != on:
                with suppress(UnreadableCheckpoint) if served else nullcontext():
                    draft = inspect_draft(source, target, offline=self.offline)
                    inspected[role] = draft or self._model(source, here=here)
        return inspected

    def _model(self, source: str, *, here: bool, masked: bool = False) -> Inspected:
        """Return the data of a whole model. Raises UserError for one that cannot be decoded where it is."""
        if here and gguf.is_gguf(source):
            source = families.locate(source)
        if source not in self._models or (masked and self._models[source].mask_id is None):
            self._models[source] = inspect(source, offline=self.offline, needs_mask=masked)
        if here and source not in self._decodable:
            refuse_undecodable(self._models[source])
            self._decodable.add(source)
        return self._models[source]
