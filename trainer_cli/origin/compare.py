"""Compare the samples and source files with which a checkpoint was trained with those of this process.

Different samples are refused like a changed `data`. Different source files are reported by name; they are refused only
if `train validate` takes the model from another project than the run's.
"""

from __future__ import annotations

import hashlib
import logging
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainer_cli.config import Change, Composed, diff, from_yaml, project_root
from trainer_cli.errors import ConfigError, ConfigErrors, UserError
from trainer_cli.keys import DATA_KEYS, SOURCE, matches_any
from trainer_cli.origin.source_files import find_imported_modules
from trainer_cli.parallel import ProcessGroup, check_same
from trainer_cli.runs import RunDir
from trainer_cli.selection import StoredCheckpoint, ckpt_argument
from trainer_cli.source_view import find_project, is_view
from trainer_cli.terminal import format_first

if TYPE_CHECKING:
    from trainer_cli.manifest import Manifest

log = logging.getLogger(__name__)

DIFFERENT = "the source is not what"
"""The beginning of the line that says what differs from a checkpoint."""
TRAIN = "train"
"""The name of the training data."""
_EVALUATION_SECTIONS = frozenset({"model", "model_call", "data", "step", "precision", "callbacks", "compile"})
"""The sections of a config that the values of an evaluation depend on."""
_MAX_DRAWS = 64
"""How often a sample that differs is read again before it is refused: augmentation may draw at random."""


@dataclass(frozen=True, slots=True)
class DataAndSource:
    """Digests of a few samples of each dataset, and of the source files imported from the project."""

    samples: Mapping[str, Mapping[str, str]]
    source: Mapping[str, str]

    @classmethod
    def of(cls, loaders: Mapping[str, Any], root: Path) -> DataAndSource:
        """The digests of a training in this process; `root` is the folder of its project."""
        return cls(_digest_samples(loaders), dict(_digest_sources(root)))

    def check_same(self, group: ProcessGroup, loaders: Mapping[str, Any]) -> None:
        """Check that every rank has rank 0's data and source. Collective.

        Raises:
            UserError: raised on every rank, with what differs and on which ranks.
        """
        from trainer_cli.data import other_samples

        facts: dict[str, object] = {}
        for name, loader in loaders.items():
            if not getattr(loader, "per_rank", False):
                facts[f"number of samples in {name}"] = count_samples(loader)
                facts[f"fingerprint of {name}"] = getattr(loader, "fingerprint", None)
        check_same(group, facts, where="data", cure="Give all machines the same data.")
        # Samples are compared after the lengths: samples of data of another length differ too, and would not say why.
        first, *later_ranks = group.gather(self)
        # Rank -> what differs there.
        samples, source = {}, {}
        for rank, other in enumerate(later_ranks, 1):
            samples[rank] = other_samples(other.samples, first.samples)
            # Only files that both have: ranks may import different modules, such as a logger on rank 0.
            shared = sorted(first.source.keys() & other.source.keys())
            source[rank] = [file for file in shared if first.source[file] != other.source[file]]
        _refuse_ranks(samples, "data", "data", "Give all machines the same data, in the same order.")
        _refuse_ranks(source, "source", None, "Give all machines the same files of the project.")


def _digest_samples(loaders: Mapping[str, Any], draws: int = 2) -> dict[str, dict[str, str]]:
    """Dataset -> sample -> its digest; samples that differ between `draws` are left out."""
    # Imported here: it imports torch.
    from trainer_cli.data import sample_digests

    return sample_digests(loaders, draws=draws)


def _digest_sources(root: Path) -> Iterator[tuple[str, str]]:
    """Path and digest of each imported file below the project's root that is neither installed nor this package's."""
    for file in sorted(set(find_imported_modules(root).values())):
        if (digest := _digest_file(root / file)) is not None:
            yield file, digest


def _digest_file(file: Path) -> str | None:
    """The digest of a source file; None if it cannot be read."""
    try:
        return digest_source(file.read_bytes())
    except OSError:
        return None


def digest_source(content: bytes) -> str:
    """The digest of the content of a source file."""
    # A checkout on another system may have other line ends.
    return hashlib.sha256(content.replace(b"\r\n", b"\n")).hexdigest()[:16]


def other_source(source: Mapping[str, str], *roots: Path) -> dict[str, str]:
    """Source files of a checkpoint that differ in this project -> `changed` or `not there`.

    Args:
        roots: folders of the project, of which the first that has a file counts.
    """
    digests = {file: next(filter(None, (_digest_file(root / file) for root in roots)), None) for file in source}
    differing = {file: digest for file, digest in digests.items() if digest != source[file]}
    return {file: "not there" if digest is None else "changed" for file, digest in differing.items()}


def compare_resumed(
    composed: Composed,
    checkpoint: Path,
    manifest: Manifest,
    changes: Iterable[Change],
    loaders: Mapping[str, Any],
    now: DataAndSource,
) -> None:
    """Compare this process with the origin of the checkpoint to resume.

    Raises:
        ConfigError: samples differ, though `data` did not change, and `resume_allow` does not allow it.
    """
    name = checkpoint.name
    advice = (
        f"; metrics before and after {name} may not be comparable: name=OTHER {ckpt_argument(checkpoint)} "
        "begins another run with these weights, resume=anew begins this one anew"
    )
    report_source(name, other_source(manifest.source, composed.project_root), advice)
    if not _changes_samples(changes):
        _compare_samples(composed, name, manifest, loaders, now)


def compare_forked(composed: Composed, fork: Path, now: DataAndSource) -> None:
    """Compare this process with the origin of the checkpoint whose weights a new run loads; only report differences.

    Raises:
        ConfigError: samples differ because of another `seed`, and `resume_allow` does not allow it.
    """
    manifest = StoredCheckpoint(fork).manifest
    if manifest is None:
        return
    report_source(str(fork), other_source(manifest.source, composed.project_root))
    changes = _changes_since(fork, composed)
    if manifest.samples and not _changes_samples(changes):
        differing = _find_other_samples(now, manifest)
        # A fork may train on other data, but not on the same data that another seed divides in another way.
        seeds, is_allowed = _describe_seed_change(changes), matches_any("data", composed.config.resume_allow)
        if differing and seeds and not is_allowed:
            raise _other_samples_error(str(fork), differing, seeds)
        _report_samples(str(fork), differing)


class EvaluatedOrigin:
    """Compares the origin of each evaluated checkpoint with this process, under one config."""

    def __init__(self, composed: Composed, loaders: Mapping[str, Any]) -> None:
        self._composed, self._loaders = composed, loaders
        self.now = DataAndSource.of(loaders, composed.project_root)
        self._changes: list[Change] | None = None
        self._reported: dict[str, str] = {}

    def compare(self, checkpoint: Path, run: Path | None = None) -> None:
        """Compare one checkpoint, and report what differs unless the last report was the same.

        Args:
            run: the run that saved it; None: see `run_that_saved`.

        Raises:
            ConfigError: samples differ, or so does the file of the model, which is of another project, and
                `resume_allow` does not allow it.
        """
        manifest = StoredCheckpoint(checkpoint).manifest
        if manifest is None:
            return
        root = self._composed.project_root
        differing = other_source(manifest.source, root)
        # Any attempt of the run may have saved this checkpoint.
        run = run or StoredCheckpoint(checkpoint).find_run()
        trained_in = [] if run is None else RunDir(run).project_roots
        if manifest.source and root not in trained_in and not is_view(root):
            _refuse_other_model(self._composed, checkpoint, manifest, differing, trained_in)
        if differing != self._reported:
            report_source(str(checkpoint), differing)
        self._reported = differing
        if self._changes is None:
            self._changes = _changes_since(checkpoint, self._composed)
            _report_dropped(self._composed, checkpoint, self._changes)
        if not _changes_samples(self._changes):
            seeds = _describe_seed_change(self._changes)
            _compare_samples(self._composed, str(checkpoint), manifest, self._loaders, self.now, seeds)

    def digest_differing(self) -> dict[str, str | None]:
        """Digests of the source files that differ from those of the last checkpoint; None for one that is gone."""
        return {file: _digest_file(self._composed.project_root / file) for file in self._reported}


@contextmanager
def naming_project(run: Path | None, config_dir: Path | None = None) -> Iterator[None]:
    """Add the project of a run to the cure of a mistake in its config, if the command is given in another folder.

    Args:
        run: None if it is unknown: nothing is added.
        config_dir: the `configs/` that the command names; None: that of the current folder.
    """
    try:
        yield
    except UserError as error:
        roots = [] if run is None else RunDir(run).project_roots
        projects = [project for project in roots if project.is_dir()]
        if projects and find_project(project_root(config_dir, Path.cwd())) not in projects:
            mistake = error.mistakes[-1] if isinstance(error, ConfigErrors) else error
            cure = f"Run the command in {projects[-1]}, the project of the run."
            mistake.cure = f"{cure} {mistake.cure}" if mistake.cure else cure
        raise


def count_samples(loader: Any) -> int | None:
    """The number of samples in a loader's dataset; None if it is unknown."""
    from trainer_cli.data import Loader, SharedLoader

    if isinstance(loader, SharedLoader):
        return count_samples(loader.loader)
    if isinstance(loader, Loader):
        return loader.length
    try:
        return len(loader.loader.dataset)
    except (AttributeError, TypeError):
        return None


def _refuse_ranks(differing: Mapping[int, list[str]], noun: str, where: str | None, cure: str) -> None:
    """Raise if any rank differs from rank 0."""
    listed = [f"rank {rank} ({format_first(names)})" for rank, names in differing.items() if names]
    if listed:
        raise ConfigError(f"the {noun} of rank 0 is not that of {format_first(listed)}", location=where, hint=cure)


def _refuse_other_model(
    composed: Composed, checkpoint: Path, manifest: Manifest, differing: Mapping[str, str], trained_in: list[Path]
) -> None:
    """Refuse a model whose file differs, if the run was never trained in its project."""
    root, target = composed.project_root, str(composed.config.model["_target_"])
    file = _find_defining_file(target, root)
    is_same = file in manifest.source and file not in differing
    if file is None or is_same:
        log.info(
            "%s was trained in %s; the model is the same here", checkpoint, format_first(trained_in) or "another place"
        )
        return
    if SOURCE in composed.config.resume_allow:
        return
    unchanged = [project for project in trained_in if project.is_dir() and not other_source(manifest.source, project)]
    advice = f"Run the command in {unchanged[-1]}, which has the source of the run. " if unchanged else ""
    raise ConfigError(
        f"{target} of {root} is not the class that {checkpoint} was trained with"
        f"{f' in {format_first(trained_in)}' if trained_in else ''}: {file} differs",
        location="model._target_",
        hint=f"{advice}To evaluate with this class all the same, add 'resume_allow=[{SOURCE}]'.",
    )


def _find_defining_file(target: str, root: Path) -> str | None:
    """The project file that defines an imported class or function; None if the project does not define it."""
    name, attribute = target, ""
    # From the end, up to a module: the target may be a class in a class, or a function in a module of a package.
    while name not in sys.modules and "." in name:
        name, _, attribute = name.rpartition(".")
    module = sys.modules.get(name)
    # The module that defines it: a package may only re-export it.
    module = sys.modules.get(getattr(getattr(module, attribute, None), "__module__", name))
    file = getattr(module, "__file__", None)
    path = None if file is None else Path(file)
    return path.relative_to(root).as_posix() if path is not None and path.is_relative_to(root) else None


def _changes_since(checkpoint: Path, composed: Composed) -> list[Change]:
    """The changes from the config of a checkpoint; none if it has no config."""
    source, _ = StoredCheckpoint(checkpoint).read_config()
    if not source:
        return []
    saved = from_yaml(source, trusted=True, missing_ok=True)
    return diff(saved.raw, composed.raw)


def _report_dropped(composed: Composed, checkpoint: Path, changes: Iterable[Change]) -> None:
    """Warn of settings of the run that `experiment=` leaves out, if an evaluation depends on them."""
    if not any(override.lstrip("+").startswith("experiment=") for override in composed.overrides):
        return
    matter = [change for change in changes if change.path[0] in _EVALUATION_SECTIONS]
    dropped = [str(change) for change in matter if not composed.is_typed(change)]
    if dropped:
        log.warning(
            "experiment= composes anew, without these settings of the run of %s: %s", checkpoint, format_first(dropped)
        )


def _changes_samples(changes: Iterable[Change]) -> bool:
    """Whether the changes explain different samples: an argument of the dataset changed."""
    loader_keys = set(DATA_KEYS) - {"overfit_batches"}
    return any(change.path[0] == "data" and loader_keys.isdisjoint(change.path[1:2]) for change in changes)


def _describe_seed_change(changes: Iterable[Change]) -> str:
    """`old -> new` of a changed `seed`; empty if it is the same."""
    return next((change.values for change in changes if change.path == ("seed",)), "")


def _find_other_samples(now: DataAndSource, manifest: Manifest) -> list[str]:
    """The samples of this process that are not those that the checkpoint was trained with, by name."""
    from trainer_cli.data import other_samples

    return other_samples(now.samples, manifest.samples)


def _compare_samples(
    composed: Composed, name: str, manifest: Manifest, loaders: Mapping[str, Any], now: DataAndSource, seeds: str = ""
) -> None:
    """Refuse samples that differ from those of the checkpoint `name`, or report them if that is allowed.

    Raises:
        ConfigError: samples differ, with the same libraries, and `resume_allow` does not allow it.
    """
    from trainer_cli.checkpoint import library_versions
    from trainer_cli.data import other_samples

    # First by the few draws of `now`: more are read only if something differs.
    if not _find_other_samples(now, manifest):
        return
    # Samples that differ between draws are left out: more draws show the random ones that two have missed.
    differing = other_samples(_digest_samples(loaders, _MAX_DRAWS), manifest.samples)
    versions = library_versions()
    has_other_versions = any(manifest.versions.get(name, version) != version for name, version in versions.items())
    is_allowed = has_other_versions or matches_any("data", composed.config.resume_allow)
    if not differing or is_allowed:
        _report_samples(name, differing)
        return
    raise _other_samples_error(name, differing, seeds)


def _other_samples_error(name: str, differing: Sequence[str], seeds: str) -> ConfigError:
    """The error for other samples than those of a checkpoint.

    Args:
        seeds: the former and the present `seed`, if they differ.
    """
    cause = "the order of a set or of os.listdir, and a split without a seed, differ from process to process"
    if seeds:
        cause = f"seed: {seeds} splits it anew, unless the split has a generator with a seed of its own"
    return ConfigError(
        _describe_other_data(name, differing),
        location="data",
        hint=f"Use the data of the run; {cause}. To continue anyway, add 'resume_allow=[data]'; to begin the "
        "run anew, resume=anew.",
    )


def _report_samples(name: str, differing: list[str]) -> None:
    """Warn of samples that differ from those of a checkpoint."""
    if differing:
        log.warning("%s", _describe_other_data(name, differing))


def _describe_other_data(name: str, differing: Sequence[str]) -> str:
    """A sentence on the samples that differ from those of a checkpoint."""
    differ = "differs" if len(differing) == 1 else "differ"
    return f"the data is not what {name} was trained with: {format_first(differing)} {differ}"


def report_source(name: str, differing: Mapping[str, str], advice: str = "") -> None:
    """Report the source files of a checkpoint that differ in this project, as `other_source` returns them."""
    if differing:
        log.warning("%s %s was trained with: %s", DIFFERENT, name, name_files(differing) + advice)


def name_files(differing: Mapping[str, str]) -> str:
    """Files that `other_source` returns, each with how it differs."""
    return format_first([f"{file} ({how})" for file, how in differing.items()])
