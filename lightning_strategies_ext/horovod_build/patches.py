"""Fixes of Horovod 0.28.1 for current toolchains. Each patch states its reason.

If a patch does not find the text that it replaces, the source is not the expected release, and an error is raised.
Without the patch, the build would fail much later with a C++ error, or succeed with an extension that cannot be loaded.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

#: Part of a wheel's key. Increase it when a patch changes, so that wheels are built again.
REVISION = 2


class UnknownSourceError(Exception):
    """Raised if a patch does not find the text that it replaces."""


@dataclass(frozen=True)
class SourcePatch:
    """Replacement of a text in one file.

    Attributes:
        file: Path relative to the root of the source.
        old: Text to replace, which occurs exactly once.
        new: New text.
        reason: Reason for the change, for messages.
    """

    file: str
    old: str
    new: str
    reason: str


def patches(
    cxx_standard: int, library_directories: Sequence[str] = (), with_cuda: bool = False
) -> Iterator[SourcePatch]:
    """Yields all patches, in the order in which they are applied.

    Args:
        cxx_standard: C++ standard that the headers of the installed torch require, such as 17.
        library_directories: Library directories of MPI and NCCL outside the environment.
        with_cuda: Whether the build uses CUDA.
    """
    searched = ["$ORIGIN/../../../..", "$ORIGIN/../../torch/lib", "$ORIGIN/../../nvidia/nccl/lib", *library_directories]
    for file in ("CMakeLists.txt", "horovod/torch/CMakeLists.txt"):
        yield SourcePatch(
            file,
            "set(CMAKE_CXX_STANDARD 14)",
            f"set(CMAKE_CXX_STANDARD {cxx_standard})",
            f"torch's headers require C++{cxx_standard}",
        )
    yield SourcePatch(
        "horovod/common/ops/cuda/CMakeLists.txt",
        "set(CMAKE_CUDA_STANDARD 11)",
        f"set(CMAKE_CUDA_STANDARD {cxx_standard})",
        "CUDA 13 no longer compiles C++11",
    )
    yield SourcePatch(
        "CMakeLists.txt",
        '"${PROJECT_SOURCE_DIR}/cmake/upstream/")',
        ")",
        "Horovod's copy of CMake's FindCUDA is from 2020; CMake's own module supports current toolkits",
    )
    yield SourcePatch(
        "CMakeLists.txt",
        "set(CMAKE_CXX_STANDARD_REQUIRED ON)",
        "set(CMAKE_CXX_STANDARD_REQUIRED ON)\n"
        "set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)\n"
        f'set(CMAKE_INSTALL_RPATH "{";".join(searched)}")',
        "a stored wheel must search the environment where it is installed before the one where it was built: pip's MPI "
        "is in the environment's lib directory, four levels up, and torch and its NCCL are next to Horovod",
    )
    if not with_cuda:
        yield SourcePatch(
            "cmake/Modules/FindPytorch.cmake",
            "print(True if ((torch.version.cuda is not None) and (CUDA_HOME is not None)) else False)",
            "print(False)",
            "a torch with CUDA and any nvcc, even of another version, caused a CUDA build that was not requested",
        )
    yield SourcePatch(
        "setup.py",
        "make_args = ['-j8'] if not os.environ.get('MAKEFLAGS') else []",
        "make_args = []",
        "eight compilers at once exhaust the memory of small machines; CMAKE_BUILD_PARALLEL_LEVEL sets their number",
    )
    yield SourcePatch(
        "setup.py",
        "make_args.append('VERBOSE=1')",
        "pass",
        "ninja interprets VERBOSE=1 as a target, and without it the log is a tenth as long",
    )
    yield SourcePatch(
        "horovod/torch/CMakeLists.txt",
        "from distutils.sysconfig import get_python_inc; print(get_python_inc())",
        "import sysconfig; print(sysconfig.get_path('include'))",
        "Python 3.12 has no distutils",
    )
    yield SourcePatch(
        "horovod/runner/js_run.py",
        "from distutils.spawn import find_executable",
        "from shutil import which as find_executable",
        "Python 3.12 has no distutils, and horovodrun imports this module at startup",
    )
    yield SourcePatch(
        "setup.py",
        "setup_requires=require_list if is_build_action() else [],",
        "setup_requires=[],",
        "setuptools would download missing packages, of any version and without a hash; the build imports none of them",
    )
    yield from _hang_patches()


def _hang_patches() -> Iterator[SourcePatch]:
    # After the loss of another rank, Horovod's background thread fails pending operations and releases their tensors.
    # For the release, torch acquires the GIL (observed with 2.13), while the thread holds locks of Horovod.
    deadlock = (
        "a thread that started an operation then waited for Horovod's locks while it held the GIL, and Horovod's "
        "thread for the GIL while it held these locks: the rank hung"
    )
    file = "horovod/torch/mpi_ops_v2.cc"
    yield SourcePatch(
        file,
        "PYBIND11_MODULE(mpi_lib_v2, m) {",
        "namespace {\n"
        "struct ModuleWithoutGil {\n"
        "  py::module_& module;\n"
        "  template <typename F> void def(const char* name, F function) {\n"
        "    module.def(name, function, py::call_guard<py::gil_scoped_release>());\n"
        "  }\n"
        "};\n"
        "} // namespace\n\n"
        "PYBIND11_MODULE(mpi_lib_v2, module) {\n"
        "  ModuleWithoutGil m{module};",
        deadlock,
    )
    yield SourcePatch(
        file,
        'm.def("horovod_torch_wait_and_clear", &WaitAndClear);',
        'module.def("horovod_torch_wait_and_clear", &WaitAndClear);',
        "the function releases the GIL itself",
    )
    lost = "an operation that was queued after Horovod's thread had failed all queued operations never ended"
    yield SourcePatch(
        "horovod/common/tensor_queue.h",
        "  void FinalizeTensorQueue(const Status& status);",
        "  void FinalizeTensorQueue(const Status& status);\n\n  void Reopen();",
        lost,
    )
    yield SourcePatch(
        "horovod/common/tensor_queue.h",
        "  std::queue<Request> message_queue_;",
        "  std::queue<Request> message_queue_;\n\n"
        "  // What is added gets this status when it is not OK.\n"
        "  Status status_;",
        lost,
    )
    for old in (
        "Status TensorQueue::AddToTensorQueue(TensorTableEntry& e, Request& message) {\n"
        "  std::lock_guard<std::mutex> guard(mutex_);",
        "                                          std::vector<Request>& messages) {\n"
        "  std::lock_guard<std::mutex> guard(mutex_);",
    ):
        new = f"{old}\n  if (!status_.ok()) {{\n    return status_;\n  }}"
        yield SourcePatch("horovod/common/tensor_queue.cc", old, new, lost)
    old = "void TensorQueue::FinalizeTensorQueue(const Status& status) {\n  std::lock_guard<std::mutex> guard(mutex_);"
    reopen = "void TensorQueue::Reopen() {\n  std::lock_guard<std::mutex> guard(mutex_);\n  status_ = Status::OK();\n}"
    yield SourcePatch("horovod/common/tensor_queue.cc", old, f"{reopen}\n\n{old}\n  status_ = status;", lost)
    for library in ("MPI", "Gloo"):
        old = f'  LOG(TRACE) << "Initializing new process set with {library}: "'
        yield SourcePatch("horovod/common/process_set.cc", old, f"  tensor_queue.Reopen();\n{old}", lost)


def apply_patches(
    source: Path, cxx_standard: int, library_directories: Sequence[str] = (), with_cuda: bool = False
) -> list[SourcePatch]:
    """Applies all patches to an unpacked source, in place.

    Args:
        source: Root of the source.
        cxx_standard: C++ standard that the headers of the installed torch require, such as 17.
        library_directories: Library directories of MPI and NCCL outside the environment.
        with_cuda: Whether the build uses CUDA.

    Returns:
        The applied patches.

    Raises:
        UnknownSourceError: If the text of a patch does not occur exactly once; the source must not be built then.
    """
    done = list(patches(cxx_standard, library_directories, with_cuda))
    for patch in done:
        file = source / patch.file
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        if (found := text.count(patch.old)) != 1:
            where = (
                f"occurs {found} times in {patch.file}"
                if text
                else f"is missing, because there is no file {patch.file}"
            )
            raise UnknownSourceError(
                f"The fixes do not match this Horovod source: {patch.old!r} {where}. The fix is required because"
                f" {patch.reason}. Report this to the developers of lightning-strategies-ext."
            )
        file.write_text(text.replace(patch.old, patch.new), encoding="utf-8")
    return done
