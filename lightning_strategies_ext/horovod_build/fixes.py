"""What is changed in Horovod 0.28.1 so that it builds and runs today. Each fix says why it is needed.

A fix that does not find what it replaces is an error: then the source is not the one it was written for, and a build
without it would fail much later with a message about C++, or worse, succeed and not load.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

#: Part of the key of a wheel: raise it when a fix changes, so that wheels of the former fixes are built again.
REVISION = 2


class UnknownSourceError(Exception):
    """A fix did not find the text that it replaces."""


@dataclass(frozen=True)
class Fix:
    """One replacement of a text in one file.

    Attributes:
        file: Relative to the root of the source.
        old: What must stand there.
        new: What stands there afterwards.
        reason: Why.
    """

    file: str
    old: str
    new: str
    reason: str


def fixes(cxx_standard: int, library_directories: Sequence[str] = (), with_cuda: bool = False) -> Iterator[Fix]:
    """All fixes, in the order in which they are applied.

    Args:
        cxx_standard: The C++ standard that the headers of the installed torch ask for.
        library_directories: Where MPI and NCCL lie, if they are not in the environment.
        with_cuda: Whether CUDA is to be used.
    """
    searched = ["$ORIGIN/../../../..", "$ORIGIN/../../torch/lib", "$ORIGIN/../../nvidia/nccl/lib", *library_directories]
    for file in ("CMakeLists.txt", "horovod/torch/CMakeLists.txt"):
        yield Fix(
            file,
            "set(CMAKE_CXX_STANDARD 14)",
            f"set(CMAKE_CXX_STANDARD {cxx_standard})",
            f"torch's headers refuse to be compiled as less than C++{cxx_standard}",
        )
    yield Fix(
        "horovod/common/ops/cuda/CMakeLists.txt",
        "set(CMAKE_CUDA_STANDARD 11)",
        f"set(CMAKE_CUDA_STANDARD {cxx_standard})",
        "CUDA 13 does not compile C++11 any more",
    )
    yield Fix(
        "CMakeLists.txt",
        '"${PROJECT_SOURCE_DIR}/cmake/upstream/")',
        ")",
        "Horovod's copy of CMake's search for CUDA is of 2020; CMake's own knows today's toolkits",
    )
    yield Fix(
        "CMakeLists.txt",
        "set(CMAKE_CXX_STANDARD_REQUIRED ON)",
        "set(CMAKE_CXX_STANDARD_REQUIRED ON)\n"
        "set(CMAKE_BUILD_WITH_INSTALL_RPATH ON)\n"
        f'set(CMAKE_INSTALL_RPATH "{";".join(searched)}")',
        "a kept wheel must look first in the environment where it is installed, not in the one where it was built: "
        "pip's MPI lies in the environment's lib directory, four levels up, and torch and its NCCL lie beside Horovod",
    )
    if not with_cuda:
        yield Fix(
            "cmake/Modules/FindPytorch.cmake",
            "print(True if ((torch.version.cuda is not None) and (CUDA_HOME is not None)) else False)",
            "print(False)",
            "a torch with CUDA beside any nvcc, be it of another version, made it a CUDA build without being asked",
        )
    yield Fix(
        "setup.py",
        "make_args = ['-j8'] if not os.environ.get('MAKEFLAGS') else []",
        "make_args = []",
        "eight compilers at once exhaust the memory of small machines; CMAKE_BUILD_PARALLEL_LEVEL says how many",
    )
    yield Fix(
        "setup.py",
        "make_args.append('VERBOSE=1')",
        "pass",
        "ninja takes VERBOSE=1 for a target, and the log is a tenth as long without it",
    )
    yield Fix(
        "horovod/torch/CMakeLists.txt",
        "from distutils.sysconfig import get_python_inc; print(get_python_inc())",
        "import sysconfig; print(sysconfig.get_path('include'))",
        "Python 3.12 has no distutils",
    )
    yield Fix(
        "horovod/runner/js_run.py",
        "from distutils.spawn import find_executable",
        "from shutil import which as find_executable",
        "Python 3.12 has no distutils, and horovodrun imports this module at its start",
    )
    yield Fix(
        "setup.py",
        "setup_requires=require_list if is_build_action() else [],",
        "setup_requires=[],",
        "setuptools would download what is missing, of any version and without a hash; the build imports none of it",
    )
    yield from _fixes_of_hangs()


def _fixes_of_hangs() -> Iterator[Fix]:
    # When another rank is lost, Horovod's own thread fails what is under way and lets go of its tensors. For that torch
    # takes Python's lock (seen with 2.13), and Horovod does it under locks of its own.
    deadlock = (
        "whoever began an operation then waited for Horovod's locks with Python's, and Horovod's thread for Python's "
        "with its own: the rank hung for ever"
    )
    file = "horovod/torch/mpi_ops_v2.cc"
    yield Fix(
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
    yield Fix(
        file,
        'm.def("horovod_torch_wait_and_clear", &WaitAndClear);',
        'module.def("horovod_torch_wait_and_clear", &WaitAndClear);',
        "it gives Python's lock away by itself",
    )
    lost = "what was put into the queue after Horovod's thread had failed all that was in it never ended"
    yield Fix(
        "horovod/common/tensor_queue.h",
        "  void FinalizeTensorQueue(const Status& status);",
        "  void FinalizeTensorQueue(const Status& status);\n\n  void Reopen();",
        lost,
    )
    yield Fix(
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
        yield Fix("horovod/common/tensor_queue.cc", old, new, lost)
    old = "void TensorQueue::FinalizeTensorQueue(const Status& status) {\n  std::lock_guard<std::mutex> guard(mutex_);"
    reopen = "void TensorQueue::Reopen() {\n  std::lock_guard<std::mutex> guard(mutex_);\n  status_ = Status::OK();\n}"
    yield Fix("horovod/common/tensor_queue.cc", old, f"{reopen}\n\n{old}\n  status_ = status;", lost)
    for library in ("MPI", "Gloo"):
        old = f'  LOG(TRACE) << "Initializing new process set with {library}: "'
        yield Fix("horovod/common/process_set.cc", old, f"  tensor_queue.Reopen();\n{old}", lost)


def apply_fixes(
    source: Path, cxx_standard: int, library_directories: Sequence[str] = (), with_cuda: bool = False
) -> list[Fix]:
    """Changes an unpacked source in place and returns what was done.

    Raises:
        UnknownSourceError: If a fix does not find exactly one place; nothing is to be built from the source then.
    """
    done = list(fixes(cxx_standard, library_directories, with_cuda))
    for fix in done:
        file = source / fix.file
        text = file.read_text(encoding="utf-8") if file.is_file() else ""
        if (found := text.count(fix.old)) != 1:
            where = f"found {found} times in {fix.file}" if text else f"and there is no file {fix.file}"
            raise UnknownSourceError(
                f"This is not the Horovod source that the fixes were written for: {fix.old!r} is {where}. "
                f"It had to be changed because {fix.reason}. Please report it to lightning-strategies-ext."
            )
        file.write_text(text.replace(fix.old, fix.new), encoding="utf-8")
    return done
