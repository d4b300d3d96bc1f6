#!/bin/sh
# Makes the base image `python:3.11-slim` out of this machine's own Python, without a registry.
#
# For machines that cannot pull images.  Where the real one can be pulled, do not run this: the
# Dockerfile takes whichever image carries the tag.  What goes in:
#   - the interpreter that runs as `python3` (or $PYTHON), its standard library and its libpython;
#   - a shell and the few programs that the Dockerfile and a person in a container use;
#   - every shared library these need, libstdc++ and the glibc parts that wheels load by name;
#   - the certificate bundle, so that pip can reach an index from inside a build.
#
#   usage: make_base_image.sh [TAG]        (TAG defaults to python:3.11-slim)
set -eu

TAG=${1:-python:3.11-slim}
PYTHON=${PYTHON:-python3}
PROGRAMS='sh cat chmod chown cp env grep id ln ls mkdir mv rm sleep'
LIBRARIES='libc libm libpthread librt libdl libutil libresolv libnss_dns libnss_files libgcc_s
           libstdc++'

fail() {
    echo "make_base_image: $1" >&2
    exit 1
}

ask_python() {
    "$PYTHON" -c "import sys, sysconfig; print($1)"
}

command -v docker >/dev/null || fail 'no docker command; install docker.io'
docker info >/dev/null 2>&1 || fail 'no container engine answers; start dockerd or set DOCKER_HOST'
if docker image inspect "$TAG" >/dev/null 2>&1; then
    echo "$TAG is already here, nothing to do"
    exit 0
fi

version=$(ask_python "'%d.%d' % sys.version_info[:2]")
case $TAG in
python:"$version"*) ;;
*) fail "$TAG asks for another Python than $PYTHON, which is $version; set PYTHON" ;;
esac
stdlib=$(ask_python "sysconfig.get_path('stdlib')")
interpreter=$(ask_python "__import__('os').path.realpath(sys.executable)")
multiarch=$(ask_python "sysconfig.get_config_var('MULTIARCH')")
[ -d "$stdlib/ensurepip" ] || fail "$PYTHON has no ensurepip; install python3-venv"

root=$(mktemp -d)
trap 'rm -rf "$root"' EXIT
mkdir -p "$root/usr/local/bin" "$root/usr/local/lib/python$version" "$root/usr/bin" \
    "$root/usr/share" "$root/etc/ssl/certs" "$root/root" "$root/tmp" "$root/var/lib"
ln -s usr/bin "$root/bin"
chmod 1777 "$root/tmp"

# Python.  Its own tests, the site packages and the byte code are not part of a slim image.
tar -C "$stdlib" -c --exclude=./test --exclude=./idlelib --exclude=./site-packages \
    --exclude=./dist-packages --exclude='./config-*' --exclude=__pycache__ --exclude='*.a' . |
    tar -C "$root/usr/local/lib/python$version" -x
mkdir -p "$root/usr/local/lib/python$version/site-packages"
cp "$interpreter" "$root/usr/local/bin/python$version"
ln -s "python$version" "$root/usr/local/bin/python3"
ln -s python3 "$root/usr/local/bin/python"
# Debian keeps the wheels that ensurepip installs apart from it.
[ ! -d /usr/share/python-wheels ] || cp -R /usr/share/python-wheels "$root/usr/share/"

for program in $PROGRAMS; do
    path=$(ask_python "__import__('shutil').which('$program') or ''")
    [ -n "$path" ] || fail "the program $program is missing here"
    cp -L "$path" "$root/usr/bin/$program"
done

# Shared libraries: what the loader would find for every binary above, at the same paths.
copy_library() {
    [ -e "$root$1" ] || { mkdir -p "$root$(dirname "$1")" && cp -L "$1" "$root$1"; }
}
{
    for binary in "$interpreter" "$stdlib"/lib-dynload/*.so "$root"/usr/bin/*; do
        ldd "$binary" 2>/dev/null || true
    done | sed -n -e 's/.*=> \(\/[^ ]*\) .*/\1/p' -e 's/^[[:space:]]*\(\/[^ ]*\) .*/\1/p'
    for library in $LIBRARIES; do
        for folder in "/lib/$multiarch" "/usr/lib/$multiarch"; do
            ls "$folder/$library".so.[0-9]* 2>/dev/null || true
        done
    done
} | sort -u | while read -r library; do
    case $library in
    */libpython*) cp -L "$library" "$root/usr/local/lib/" ;;
    *) copy_library "$library" ;;
    esac
done

bundle=/etc/ssl/certs/ca-certificates.crt
[ ! -f "$bundle" ] || cp -L "$bundle" "$root$bundle"
echo 'root:x:0:0:root:/root:/bin/sh' >"$root/etc/passwd"
echo 'root:x:0:' >"$root/etc/group"
echo 'hosts: files dns' >"$root/etc/nsswitch.conf"

tar -C "$root" -c . | docker import \
    --change 'ENV PATH=/usr/local/bin:/usr/bin:/bin' \
    --change 'ENV LD_LIBRARY_PATH=/usr/local/lib' \
    --change "ENV PIP_CERT=$bundle" \
    --change 'LABEL org.opencontainers.image.description="made locally from the host Python"' \
    --change 'CMD ["python3"]' \
    - "$TAG" >/dev/null
echo "made $TAG from $interpreter"
