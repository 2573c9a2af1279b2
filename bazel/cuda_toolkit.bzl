"""Repository rule: an installed CUDA toolkit, if there is one: HAS_CUDA and NVCC in its defs.bzl, and the static runtime."""

_BUILD = """
package(default_visibility = ["//visibility:public"])

cc_library(
    name = "cudart_static",
    srcs = ["libcudart_static.a"],
    hdrs = glob(["include/*.h", "include/crt/*.h"]),
    includes = ["include"],
    linkopts = ["-ldl", "-lpthread", "-lrt"],
)
"""

def _cuda_toolkit_impl(ctx):
    nvcc = ctx.os.environ.get("NVCC") or ctx.which("nvcc")
    root = None
    if nvcc:
        # nvcc may be a wrapper script; its dry run prints the toolkit's own folder.
        result = ctx.execute([nvcc, "--dryrun", "-x", "cu", "/dev/null"])
        for line in result.stderr.split("\n"):
            if line.startswith("#$ TOP="):
                root = line[len("#$ TOP="):].strip()
    library = None
    if root:
        for folder in ("lib64", "targets/x86_64-linux/lib", "targets/sbsa-linux/lib", "lib"):
            path = ctx.path("%s/%s/libcudart_static.a" % (root, folder))
            if not library and path.exists:
                library = path
    if library:
        ctx.symlink(library, "libcudart_static.a")
        ctx.symlink(root + "/include", "include")
        ctx.file("BUILD", _BUILD)
    else:
        ctx.file("BUILD", "")
    ctx.file("defs.bzl", "HAS_CUDA = %s\nNVCC = %r\n" % (bool(library), str(root) + "/bin/nvcc" if library else ""))

cuda_toolkit = repository_rule(
    implementation = _cuda_toolkit_impl,
    environ = ["NVCC", "PATH"],
    local = True,
)
