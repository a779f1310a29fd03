"""Targets of a hostile config, and what each is called with."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

import trainer_cli
from trainer_cli.callbacks.skip_samples import _owner
from trainer_cli.components.targets import Trust
from trainer_cli.errors import ConfigError, ExitCode
from trainer_cli.running.build import Builder
from trainer_cli.schema.sections import TrainConfig


def words(text: str) -> list[str]:
    return text.split()


# What each list is called with, and would leave the canary behind if it ran.
COMMANDS = words("""
os.system posix.system os.popen os.execvp os.spawnlp os.posix_spawn subprocess.run subprocess.call subprocess.Popen
subprocess.check_call subprocess.check_output subprocess.getoutput subprocess.getstatusoutput pty.spawn
asyncio.create_subprocess_shell asyncio.run multiprocessing.Process concurrent.futures.ProcessPoolExecutor
logging.os.system shutil.os.system pathlib.os.system tempfile._os.system random._os.system
torch.os.system torch.hub.os.system torch.distributed.run.main torch.distributed.launch.main
torch.distributed.launcher.api.launch_agent torch.multiprocessing.spawn torch.utils.cpp_extension.load
torch.utils.cpp_extension.load_inline torch.utils.cpp_extension.subprocess.run torch.utils.cpp_extension.CUDAExtension
torch.utils.collect_env.run torch._inductor.codecache.subprocess.run torch._dynamo.config.os.system
torch.nn.modules.module.torch.os.system torch.nn.modules.module.torch.hub.os.system
torch.optim.optimizer.torch.os.system torch.optim.lr_scheduler.torch.utils.cpp_extension.load
trainer_cli.running.fitting.os.system trainer_cli.commands.command_line.os.system trainer_cli.runs.run_dir.os.system
trainer_cli.components.targets.importlib.import_module trainer_cli.trainer.trainer.torch.os.system
trainer_cli.data.datasets.torch.os.system trainer_cli.models.mlp.torch.hub.os.system
trainer_cli.addons.text.read_text.sysconfig.os.system trainer_cli.loggers.console.sys.modules
trainer_cli.commands.command_line.main
trainer_cli.running.fitting.fit trainer_cli.running.validation.validate trainer_cli.__main__.main webbrowser.open
mine_hole.go mine_hole.os.system mine_hole.bound mine_hole.late mine_hole.Inside.go mine_hole.Liar
mine_hole.lying mine_hole.made mine_hole.Net.__subclasses__ mine_hole.Net.__class__ mine_hole.Net.mro
mine_hole.INSTANCE mine_hole.WORDS.format mine_hole.WORDS mine_hole.np.f2py.run_main mine_hole.plain.__globals__.get
mine_hole.plain.__call__ mine_hole.Hidden mine_hole.leaves.start
""")
CODES = words("""
builtins.eval builtins.exec builtins.compile builtins.__import__ builtins.getattr builtins.setattr builtins.vars
builtins.globals builtins.map builtins.type code.interact code.InteractiveConsole codeop.compile_command
timeit.timeit timeit.repeat timeit.Timer cProfile.run profile.run pdb.run bdb.Bdb doctest.debug_script
importlib.import_module importlib.reload importlib.util.module_from_spec pkgutil.resolve_name pydoc.locate
pydoc.safeimport types.FunctionType types.CodeType functools.partial functools.reduce operator.methodcaller
operator.attrgetter itertools.starmap ctypes.CDLL ctypes.PyDLL yaml.load yaml.unsafe_load yaml.full_load
hydra.utils.instantiate hydra.utils.call hydra.utils.get_method hydra.utils.get_class hydra.main hydra.compose
omegaconf.OmegaConf.register_new_resolver omegaconf.OmegaConf.create torch.compile torch.jit.script
torch.fx.wrap torch.library.impl torch.autograd.Function.apply sys.settrace atexit.register signal.signal
trainer_cli.config.composing.compose trainer_cli.components.targets.import_target trainer_cli.errors.ConfigError
torch.nn.modules.module.functools.partial torch.optim.lr_scheduler.partial torch.nn.modules.module.Callable
""")
FILES = words("""
builtins.open io.open codecs.open os.open os.mkdir os.makedirs os.mkfifo os.remove os.truncate os.symlink
pathlib.Path.touch pathlib.Path.write_text pathlib.Path.mkdir pathlib.Path.unlink pathlib.Path.open pathlib.Path
shutil.copyfile shutil.copy shutil.copytree shutil.move shutil.rmtree shutil.make_archive shutil.unpack_archive
tempfile.NamedTemporaryFile tempfile.mkdtemp sqlite3.connect zipfile.ZipFile tarfile.open gzip.open bz2.open lzma.open
shelve.open dbm.open logging.FileHandler logging.basicConfig logging.config.dictConfig logging.config.fileConfig
urllib.request.urlopen urllib.request.urlretrieve http.server.HTTPServer socket.socket smtplib.SMTP ftplib.FTP
runpy.run_path pickle.load pickle.loads pickle.Unpickler marshal.loads zipimport.zipimporter
numpy.save numpy.savez numpy.savetxt numpy.load numpy.fromfile numpy.memmap numpy.ndarray.tofile
torch.load torch.save torch.serialization.load torch.serialization.save torch.serialization.pickle.load
torch.hub.load torch.hub.load_state_dict_from_url torch.hub.download_url_to_file torch.jit.load torch.jit.save
torch.package.PackageImporter torch.package.PackageExporter torch.ops.load_library torch.classes.load_library
torch.storage._load_from_bytes torch.from_file torch.UntypedStorage.from_file torch.export.load
torch.distributed.checkpoint.load torch.distributed.checkpoint.FileSystemWriter torch.utils.data.DataLoader
torch.utils.tensorboard.SummaryWriter torch.profiler.profile torch.nn.Module.apply torch.nn.Module.load_state_dict
torch.nn.init.zeros_ torch.nn.functional.relu torch.nn.Parameter torch.nn.parallel.DataParallel
torch.nn.utils.clip_grad_norm_ torch.nn.Linear.__init__ torch.nn.Linear.__new__ torch.nn.Linear.__class__
torch.nn.Linear.forward.__globals__ torch.nn.modules.module.OrderedDict torch.nn.modules.module.torch.load
torch.nn.modules.module.warnings.warn torch.nn.modules.linear.math.sqrt torch.nn.modules.module._WrappedHook
torch.nn.modules.module.register_module_forward_hook torch.optim.optimizer.torch.load torch.optim.optimizer.pickle
torch.optim.optimizer.defaultdict torch.optim.swa_utils.get_ema_multi_avg_fn torch.nn.modules torch.optim torch.nn
trainer_cli.files.durable.replace trainer_cli.files.durable.keep_spans trainer_cli.files.durable.sync
trainer_cli.storage.local.LocalStorage trainer_cli.storage.disk.Disk
trainer_cli.runs.run_dir.RunDir
trainer_cli.trainer.trainer.Trainer trainer_cli.Trainer trainer_cli.data.datasets.torch.load trainer_cli.loggers
trainer_cli.loggers.text_files.JsonlLogger.encode trainer_cli.loggers.text_files.JsonlLogger.read_ranges
trainer_cli.addons.text.read_text.Path.touch trainer_cli.loggers.text_files.Path
trainer_cli.models.classification.classification trainer_cli.addons.text.text._digest
mine_hole.load mine_hole.np.save mine_hole.Path.touch mine_hole.torch.load mine_hole.wrapped other_hole.X
""")
TARGETS = [*COMMANDS, *CODES, *FILES]

HOLES = """
import functools, logging, os, subprocess
from concurrent.futures import ThreadPoolExecutor
from os import system as go
from pathlib import Path

import numpy as np
import torch
from torch import load

import trainer_cli
class Net: ...
class Log(trainer_cli.JsonlLogger): ...
class Inside:
    go = staticmethod(os.system)
class Callable:
    def __call__(self, *args): os.system(*args)
class Liar:
    def __init__(self, command): os.system(command)
Liar.__module__ = "torch.nn.modules.linear"
def plain(): ...
def lying(command): os.system(command)
lying.__module__ = "json"
class leaves(subprocess.Popen): ...
made = type("Popen", (subprocess.Popen,), {"__module__": "subprocess"})
Hidden = type("Linear", (torch.nn.Linear,), {"__module__": "torch.nn.modules.linear"})
wrapped = functools.wraps(torch.load)(lambda *args, **kwargs: torch.load(*args, **kwargs))
late = functools.partial(os.system)
bound = ThreadPoolExecutor(1).submit
INSTANCE, WORDS = Callable(), "words"
"""


# What torch's modules import or wrap is not torch's: its path begins with a package that is trusted, no more.
THROUGH_TORCH = words("""
torch.os.system torch.hub.os.system torch.hub.os.popen torch.hub.sys.modules.get torch.hub.Path.touch torch.hub.urlopen
torch.hub.shutil.rmtree torch.hub.zipfile.ZipFile torch.hub.tempfile.mkdtemp torch.hub.importlib.import_module
torch.hub.load.__globals__.get torch.hub.load.__builtins__.get torch.hub.load.__call__ torch.hub.load.__class__
torch.serialization.pickle.loads torch.serialization.pickle.load torch.serialization.io.open
torch.serialization.os.system
torch.serialization.shutil.copyfile torch.storage.io.BytesIO torch.multiprocessing.Process torch.multiprocessing.Pool
torch.nn.Module.__subclasses__ torch.nn.Module.__class__ torch.nn.modules.module.functools.partial
torch.nn.modules.module.partial torch.utils.cpp_extension.subprocess.run
torch.utils.cpp_extension.importlib.import_module
torch.utils.data.DataLoader.__init__.__globals__.get torch.utils.collect_env.run.__globals__.get
torch.distributed.run.os.system torch.optim.lr_scheduler.partial torch.optim.optimizer.defaultdict
""")


# Loaders, launchers, compilers and what is not a component, each with trust in its own package.
TRUSTED = words("""
torch.hub.load torch.hub.load_state_dict_from_url torch.hub.download_url_to_file torch.hub.list torch.hub.help
torch.load torch.save torch.serialization.load torch.serialization.save torch.serialization.add_safe_globals
torch.jit.load torch.jit.save torch.jit.script torch.jit.trace torch.jit.CompilationUnit torch.jit.ScriptModule
torch.jit.freeze torch.jit.optimize_for_inference torch.package.PackageImporter torch.package.PackageExporter
torch.ops.load_library torch.classes.load_library torch.utils.cpp_extension.load
torch.utils.cpp_extension.load_inline torch.utils.cpp_extension.CppExtension torch.utils.cpp_extension.BuildExtension
torch.distributed.run.main torch.distributed.run.run torch.distributed.launch.main
torch.distributed.launcher.api.launch_agent torch.distributed.launcher.api.elastic_launch
torch.distributed.init_process_group torch.distributed.checkpoint.load torch.distributed.checkpoint.save
torch.distributed.checkpoint.FileSystemWriter torch.distributed.checkpoint.FileSystemReader
torch.distributed.TCPStore torch.distributed.FileStore torch.multiprocessing.spawn
torch.multiprocessing.start_processes torch.utils.collect_env.run torch.utils.collect_env.main
torch.fx.graph_module._exec_with_source torch.fx.graph_module.GraphModule torch.fx.symbolic_trace torch.fx.Tracer
torch.compile torch.compiler.compile torch.export.load torch.export.save torch.export.export torch.onnx.export
torch.storage._load_from_bytes torch.from_file torch.UntypedStorage.from_file torch.frombuffer
torch.utils.tensorboard.SummaryWriter torch.profiler.profile torch.utils.data.get_worker_info
torch.utils.checkpoint.checkpoint torch.utils.benchmark.Timer torch.library.impl torch.library.custom_op
torch.autograd.Function torch.nn.init.zeros_ torch.nn.Module.apply torch.nn.Module.load_state_dict
torch.optim.Optimizer.load_state_dict torch.Tensor.map_ torch.tensor torch.manual_seed torch.set_default_device
transformers.AutoModel.from_pretrained transformers.AutoModelForCausalLM.from_pretrained
transformers.AutoModelForCausalLM.from_config transformers.AutoConfig.from_pretrained
transformers.AutoTokenizer.from_pretrained transformers.GPT2LMHeadModel.from_pretrained
transformers.GPT2Config.from_pretrained transformers.GPT2Config.from_json_file transformers.pipeline
transformers.Trainer transformers.utils.hub.cached_file transformers.utils.import_utils.direct_transformers_import
transformers.dynamic_module_utils.get_class_from_dynamic_module transformers.dynamic_module_utils.get_class_in_module
transformers.modeling_utils.load_state_dict transformers.AutoModel
numpy.load numpy.save numpy.savez numpy.savetxt numpy.loadtxt numpy.genfromtxt numpy.fromfile numpy.memmap
numpy.frombuffer numpy.fromregex numpy.lib.format.open_memmap numpy.f2py.compile numpy.f2py.run_main
numpy.vectorize numpy.apply_along_axis numpy.array
lightning.Trainer lightning.Fabric lightning.LightningModule.load_from_checkpoint
lightning.LightningDataModule.load_from_checkpoint lightning.fabric.utilities.cloud_io._load
lightning.fabric.utilities.cloud_io.get_filesystem lightning.pytorch.callbacks.ModelCheckpoint
lightning.pytorch.callbacks.LambdaCallback lightning.pytorch.loggers.CSVLogger lightning.pytorch.cli.LightningCLI
lightning.fabric.plugins.io.torch_io.TorchCheckpointIO
peft.PeftModel.from_pretrained peft.PeftConfig.from_pretrained peft.LoraConfig.from_pretrained
peft.AutoPeftModel.from_pretrained peft.load_peft_weights peft.utils.save_and_load.torch_load
fsspec.open fsspec.open_files fsspec.open_local fsspec.filesystem fsspec.url_to_fs fsspec.get_mapper
fsspec.implementations.local.LocalFileSystem fsspec.implementations.http.HTTPFileSystem
fsspec.implementations.memory.MemoryFileSystem fsspec.core.OpenFile fsspec.registry.register_implementation
fsspec.generic.rsync
os.system os.popen os.execvp os.remove subprocess.run subprocess.Popen subprocess.check_output shutil.rmtree
pickle.loads pickle.Unpickler runpy.run_path ctypes.CDLL tempfile.mkdtemp threading.Thread multiprocessing.Process
urllib.request.urlopen importlib.import_module builtins.open functools.reduce logging.FileHandler
omegaconf.OmegaConf.load yaml.unsafe_load trainer_cli.Trainer trainer_cli.running.fitting.fit
trainer_cli.commands.command_line.main
trainer_cli.files.durable.replace trainer_cli.load_checkpoint trainer_cli.components.targets.import_target
""")


TRUST: dict[str, list[str]] = {
    **{target: [] for target in TARGETS},
    **{f"{target}, torch is trusted": ["torch"] for target in THROUGH_TORCH},
    **{f"{target}, its package is trusted": [target.partition(".")[0]] for target in TRUSTED},
    **{f"mine_hole.{name}, its package is trusted": ["mine_hole"] for name in words("go os.system Liar lying np.save")},
}


def arguments(target: str, canary: Path) -> list[Any]:
    """Arguments with which the target would leave the canary behind, if it ran."""
    if target in CODES:
        return [f"open({str(canary)!r}, 'w')"]
    if target in FILES:
        return [str(canary), "w"] if "open" in target else [str(canary)]
    return [f"touch {canary}"]


def check_refused(case: str, project: Path, folder: Path) -> None:
    """Check that a case of `TRUST` is a mistake of the config that names it, and leaves the folder empty.

    Raises:
        AssertionError: it is not refused, or something of it ran.
    """
    target = case.partition(",")[0]
    builder = Builder(TrainConfig(), Trust.recovered(project, TRUST[case]))
    node = {"_target_": target, "_args_": arguments(target, folder / "canary")}
    for made in (node, {**node, "_partial_": True}, {"_target_": "torch.nn.Sequential", "_args_": [node]}):
        with pytest.raises(ConfigError) as caught:
            builder.make(made, "model")
        assert caught.value.exit_code == ExitCode.USER
        assert target in str(caught.value)
        assert "_target_" in str(caught.value)
    assert list(folder.iterdir()) == []


# Outside of the run's directory: by their own text, or by a link that came with the run.
_PATHS = words("/etc/cron.d/x ../x ../../x a/../../x linked/x link.txt")
_WRITERS = {
    "trainer_cli.JsonlLogger": "path",
    "trainer_cli.CsvLogger": "path",
    "trainer_cli.MediaLogger": "path",
    "trainer_cli.TensorBoardLogger": "folder",
    "trainer_cli.MlflowLogger": "tracking_uri",
    "trainer_cli.TorchProfiler": "folder",
    "trainer_cli.DumpActivations": "folder",
    "trainer_cli.SaveCheckpointState": "folder",
    "trainer_cli.SystemMonitor": "path",
    "mine_hole.Log": "path",
}
_MORE = {"trainer_cli.DumpActivations": {"modules": ["*"], "every": 1}}
_FLAGS = words("""
torch.hub._hub_dir torch.version.cuda torch.backends.__name__ torch.backends.cudnn.__file__ torch.__version__
torch.utils.data.dataloader.__doc__
""")


def _present(flag: str) -> Any:
    owner, name = _owner(flag)
    return getattr(owner, name)


REACHES: dict[str, tuple[str, dict[str, Any]]] = {
    **{
        f"{target} {argument}={path}": (argument, {"_target_": target, argument: path, **_MORE.get(target, {})})
        for target, argument in _WRITERS.items()
        # That of an add-on may have been deleted.
        if target.removeprefix("trainer_cli.") in trainer_cli.__all__ or not target.startswith("trainer_cli.")
        for path in _PATHS
    },
    "a bucket": ("folder", {"_target_": "trainer_cli.SaveCheckpointState", "folder": "s3://bucket/x"}),
    "an unnamed argument": ("path", {"_target_": "trainer_cli.JsonlLogger", "_args_": ["/etc/x"]}),
    **{
        flag: (f"fit.{flag}", {"_target_": "trainer_cli.ScopedFlags", "fit": {flag: _present(flag)}}) for flag in _FLAGS
    },
}
"""Case -> (argument, node) of a component that reaches beyond its run."""
ELSEWHERE = words("torch.sys.executable torch.os.name torch.hub.sys.executable torch.backends.sys.executable")
"""Attributes of modules that torch imports: no config may set them."""


def check_bounded(case: str, project: Path, folder: Path) -> None:
    """Check that a node of `REACHES` is a mistake of a recovered config, unless the user has given the argument.

    Raises:
        AssertionError: it is let through, or hinders the user.
    """
    argument, node = REACHES[case]
    run_dir = folder / "run"
    run_dir.mkdir()
    (run_dir / "linked").symlink_to(folder)
    (run_dir / "link.txt").symlink_to(folder / "precious.txt")

    def make(trust: Trust, node: dict[str, Any]) -> object:
        builder = Builder(TrainConfig(), trust)
        builder._run_dir = run_dir
        return builder.make(node, "part.x")

    with pytest.raises(ConfigError, match="reaches beyond the run"):
        make(Trust.recovered(project, []), node)
    with pytest.raises(ConfigError, match="_partial_"):
        make(Trust.recovered(project, []), {**node, "_partial_": True})
    assert make(Trust(), node) is not None
    assert make(Trust.recovered(project, [], lambda key: key == f"part.x.{argument}"), node) is not None
    assert list(run_dir.parent.iterdir()) == [run_dir]
