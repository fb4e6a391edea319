# Shared by .ci/run and .ci/env/*; sourced by bash.

CI_CACHE="${XDG_CACHE_HOME:-$HOME/.cache}/hicache-ci"

# Interpreters that pyenv built; its shims refuse versions that are not selected, so the real ones are added.
add_pythons() {
    local version bin
    for version in 3.11 3.12 3.13 3.10; do
        for bin in "$HOME"/.pyenv/versions/"$version".*/bin; do
            if [ -x "$bin/python$version" ]; then PATH="$bin:$PATH"; fi
        done
    done
    export PATH
}

# The interpreter of the tools: the first that is there.
ci_python() {
    local name
    for name in python3.11 python3.12 python3.13 python3.10; do
        if command -v "$name" && "$name" -c '' 2>/dev/null; then return; fi
    done
    command -v python3
}

# cached_venv PYTHON REQUIREMENT...: print the path of an environment that holds exactly these pins. It is made once
# for a digest of interpreter and pins, and put in its place only when it is whole.
cached_venv() {
    local python="$1" digest place
    shift
    digest="$({ "$python" -VV; printf '%s\n' "$@"; } | sha256sum | cut -c1-16)"
    place="$CI_CACHE/$digest"
    if [ ! -e "$place/.whole" ]; then
        rm -rf "$place"
        mkdir -p "$CI_CACHE"
        "$python" -m venv "$place" >&2
        "$place/bin/python" -m pip install --quiet --disable-pip-version-check "$@" >&2
        touch "$place/.whole"
    fi
    printf '%s\n' "$place"
}
