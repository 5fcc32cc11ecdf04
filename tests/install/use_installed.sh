#!/bin/sh
# use_installed.sh STEP ARGUMENT...: one step of the tests of an installed latte; see CMakeLists.txt.
set -eux

step=$1
shift

# Where the installation put latte.pc: lib, lib64 or lib/<triplet>.
use_pkg_config() {
  pc=$(find "$1" -name latte.pc)
  [ -n "$pc" ]
  PKG_CONFIG_PATH=$(dirname "$pc")
  LD_LIBRARY_PATH=$(dirname "$PKG_CONFIG_PATH")
  export PKG_CONFIG_PATH LD_LIBRARY_PATH
}

case $step in
  install) # BUILD PREFIX
    rm -rf "$2"
    cmake --install "$1" --prefix "$2"
    ;;
  find_package) # SOURCE PREFIX WORK CXX
    rm -rf "$3"
    cmake -S "$1/examples/consumer" -B "$3" -G Ninja -DCMAKE_PREFIX_PATH="$2" -DCMAKE_CXX_COMPILER="$4"
    cmake --build "$3"
    "$3/consumer"
    "$3/consumer_shared"
    "$3/consumer_c"
    ;;
  find_package_without_cuda) # SOURCE PREFIX WORK CXX
    # Where there is no toolkit the shared library is enough.
    rm -rf "$3"
    cmake -S "$1/examples/consumer" -B "$3" -G Ninja -DCMAKE_PREFIX_PATH="$2" -DCMAKE_CXX_COMPILER="$4" \
      -DCMAKE_DISABLE_FIND_PACKAGE_CUDAToolkit=ON
    cmake --build "$3" --target consumer_shared
    "$3/consumer_shared"
    ;;
  pkg_config_shared) # SOURCE PREFIX WORK CC
    rm -rf "$3" && mkdir -p "$3"
    use_pkg_config "$2"
    # shellcheck disable=SC2046
    "$4" -std=c11 -Wall -Wextra -Werror "$1/examples/c_api.c" -o "$3/c_api" $(pkg-config --cflags --libs latte) -lm
    "$3/c_api"
    ;;
  pkg_config_static) # SOURCE PREFIX WORK CC
    # Moved first: the installed files must not remember the prefix they were installed to.
    rm -rf "$3" && mkdir -p "$3"
    cp -R "$2" "$3/moved"
    use_pkg_config "$3/moved"
    # shellcheck disable=SC2046
    "$4" -std=c11 -Wall -Wextra -Werror "$1/examples/c_api.c" -o "$3/c_api" $(pkg-config --cflags --libs latte-static)
    env -u LD_LIBRARY_PATH "$3/c_api"
    ;;
  program) # PREFIX VERSION
    "$1/bin/latte" --version | grep -F "$2"
    test -s "$1/share/man/man1/latte.1"
    ;;
  *) exit 2 ;;
esac
