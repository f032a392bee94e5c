# packages.sh - what building, running and testing needs, and how it gets installed. Sourced.
#
# The one list of packages. Installs with apt-get (Debian 12, Ubuntu 24.04), through sudo when not
# root, and only what is missing; refuses systems without apt-get.

tv_packages_build="gcc libc6-dev pkgconf meson ninja-build
    libmicrohttpd-dev libcjson-dev nettle-dev libinih-dev libcurl4-gnutls-dev libsystemd-dev
    libgnutls28-dev
    curl" # curl: the README's requests by hand
tv_packages_test="libcmocka-dev python3 python3-numpy python3-jsonschema python3-yaml python3-httpx python3-pytest python3-venv
    python3-setuptools python3-wheel python3-matplotlib openssl
    mypy clang-format-14 clang-14 libclang-rt-14-dev binutils mandoc haproxy locales"
# what tests start beside that, each skipped where it cannot be had: systemd's judge, ps(1), a browser, a shell
tv_packages_programs="systemd procps chromium chromium-driver zsh"
# of these only the programs are wanted: installed, they are services
tv_packages_unpacked="prometheus"
# of PyPI: the bundled drafter's runtime, the linter; without what it depends on, which the tests do not use
tv_python_test="onnxruntime==1.32.0 ruff==0.17.6"
tv_python_test_alone="tokenizers==0.23.3"
# of PyPI, away from Debian's modules: the contract from outside
tv_python_contract="schemathesis==4.32.5"
# NVIDIA's compiler, and what it needs beside those of the build, for the image of Dockerfile.cuda
tv_packages_cuda="g++ python3-pip"
tv_python_cuda="nvidia-cuda-nvcc==13.0.88 nvidia-nvvm==13.0.88 nvidia-cuda-crt==13.0.88 nvidia-cuda-runtime==13.0.96
    nvidia-cuda-cccl==13.0.85"
# beside those of the build, for deploy/package.sh and for the test of what it makes
tv_packages_package="build-essential debhelper dh-python fakeroot python3-all pybuild-plugin-pyproject
    python3-setuptools python3-wheel lintian mmdebstrap"

# what the programs load (Debian 12's names; Ubuntu 24.04 has packages that stand for them)
tv_packages_run="libmicrohttpd12 libcjson1 libnettle8 libinih1 libcurl3-gnutls libsystemd0 libgnutls30"

# tv_packages_install NAME...: does nothing when all are there.
tv_packages_install() {
    local package missing=""
    for package in "$@"; do
        if ! dpkg-query -W -f '${Status}' "$package" 2>/dev/null | grep -q "install ok installed"; then
            missing="$missing $package"
        fi
    done
    [ -n "$missing" ] || return 0
    if ! command -v apt-get >/dev/null; then
        echo "apt-get not found; please install:$missing" >&2
        return 1
    fi
    local as_root=""
    if [ "$(id -u)" != 0 ]; then
        as_root=sudo
    fi
    echo "installing:$missing"
    $as_root env DEBIAN_FRONTEND=noninteractive apt-get update -qq &&
        $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -qq --no-install-recommends \
            $missing >/dev/null
}

# tv_packages_unpack FOLDER NAME...: what is in these packages goes below FOLDER; nothing is installed, nobody is root.
tv_packages_unpack() {
    local folder=$1 package archives
    shift
    archives=$(mktemp -d) || return 1
    for package in "$@"; do
        if ! (cd "$archives" && apt-get download -qq "$package" && dpkg-deb -x "$package"_*.deb "$folder") 2>/dev/null; then
            rm -r "$archives"
            return 1
        fi
    done
    rm -r "$archives"
}
