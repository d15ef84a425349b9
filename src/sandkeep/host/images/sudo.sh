#!/bin/sh
# sudo for a sandbox whose default user may become anyone: a front for a setuid copy of setpriv.
# No password, no rules, no log. The environment and PATH are kept; HOME, USER and LOGNAME are the target's.
# Variables start with an underscore so that none of the caller's exported ones changes its value here.
# Built-in commands only until the last line: each program started here would cost a millisecond.

_as=/usr/libexec/sandkeep/as
_target=root _group= _login= _shell= _background= _directory= _list= _validate= _forget=

fail() {
    printf 'sudo: %s\n' "$1" >&2
    exit 1
}

usage() {
    printf 'usage: sudo [-EHnSbks] [-i | -s] [-u user] [-g group] [-D directory] [VAR=value] [--] [command [arg ...]]\n'
    printf '       sudo -l | -v | -k | -K | -V\n'
}

# Sets name, uid, gid, home and usershell from the first passwd row whose field matches; false if none does.
lookup() {
    while IFS=: read -r _name _ _uid _gid _ _home _usershell; do
        case $1 in
            name) [ "$_name" = "$2" ] && return 0 ;;
            uid) [ "$_uid" = "$2" ] && return 0 ;;
        esac
    done </etc/passwd
    return 1
}

# Sets out to $1 with a backslash before every character $2.
escape() {
    _out= _rest=$1
    while :; do
        case $_rest in
            *"$2"*) _out=$_out${_rest%%"$2"*}\\$2 _rest=${_rest#*"$2"} ;;
            *) _out=$_out$_rest; return ;;
        esac
    done
}

# Sets line to the arguments as text for a shell's -c: quoted, variables left to that shell as sudo does.
command_line() {
    _line=
    for _word; do
        escape "$_word" \\
        escape "$_out" '"'
        escape "$_out" '`'
        _line="$_line \"$_out\""
    done
}

while [ $# -gt 0 ]; do
    case $1 in
        --) shift; break ;;
        --user=* | --group=* | --chdir=*) _option=${1%%=*} _value=${1#*=}; shift; set -- "$_option" "$_value" "$@" ;;
    esac
    case $1 in
        --user) [ $# -gt 1 ] || fail 'option --user needs a user'; _target=$2; shift 2 ;;
        --group) [ $# -gt 1 ] || fail 'option --group needs a group'; _group=$2; shift 2 ;;
        --chdir) [ $# -gt 1 ] || fail 'option --chdir needs a directory'; _directory=$2; shift 2 ;;
        --prompt | --host | --close-from | --chroot | --role | --type | --other-user | --command-timeout) shift; [ $# -eq 0 ] || shift ;;
        --prompt=* | --host=* | --close-from=* | --role=* | --type=* | --other-user=* | --command-timeout=*) shift ;;
        --login) _login=1; shift ;;
        --shell) _shell=1; shift ;;
        --background) _background=1; shift ;;
        --list) _list=1; shift ;;
        --validate) _validate=1; shift ;;
        --reset-timestamp | --remove-timestamp) _forget=1; shift ;;
        --version) echo 'sudo (sandkeep) 1'; exit 0 ;;
        --help) usage; exit 0 ;;
        --preserve-env | --preserve-env=* | --set-home | --non-interactive | --stdin | --askpass | --preserve-groups | --bell) shift ;;
        --*) usage >&2; exit 1 ;;
        -?*)
            _cluster=${1#-}; shift
            while [ -n "$_cluster" ]; do
                _tail=${_cluster#?} _letter=${_cluster%"${_cluster#?}"} _cluster=${_cluster#?}
                case $_letter in
                    u | g | D | p | C | h | R | r | t | T | U)
                        if [ -n "$_tail" ]; then _value=$_tail _cluster=
                        elif [ $# -gt 0 ]; then _value=$1; shift
                        elif [ "$_letter" = h ]; then usage; exit 0
                        else fail "option -$_letter needs an argument"; fi
                        case $_letter in
                            u) _target=$_value ;;
                            g) _group=$_value ;;
                            D) _directory=$_value ;;
                            R) fail 'option -R is not supported' ;;
                        esac ;;
                    i) _login=1 ;;
                    s) _shell=1 ;;
                    b) _background=1 ;;
                    l) _list=1 ;;
                    v) _validate=1 ;;
                    k | K) _forget=1 ;;
                    V) echo 'sudo (sandkeep) 1'; exit 0 ;;
                    E | H | n | S | A | P | B | N) ;;
                    *) usage >&2; exit 1 ;;
                esac
            done ;;
        [A-Za-z_]*=*)
            case ${1%%=*} in *[!A-Za-z0-9_]*) break ;; esac
            export "$1"; shift ;;
        *) break ;;
    esac
done
# After "--" assignments may still come before the command.
while [ $# -gt 0 ]; do
    case $1 in [A-Za-z_]*=*) ;; *) break ;; esac
    case ${1%%=*} in *[!A-Za-z0-9_]*) break ;; esac
    export "$1"; shift
done

_caller_uid= _caller_gid=
while read -r _key _ _effective _; do
    case $_key in
        Uid:) _caller_uid=$_effective ;;
        Gid:) _caller_gid=$_effective; break ;;
    esac
done </proc/self/status
[ -n "$_caller_uid" ] || fail 'cannot tell who is calling: /proc is not mounted'
if lookup uid "$_caller_uid"; then _caller=$_name; else _caller="#$_caller_uid"; fi

if [ "$_caller_uid" != 0 ] && [ ! -x "$_as" ]; then
    fail "$_caller may not run sudo: not a member of the group that may"
fi
if [ -n "$_list" ]; then
    [ $# -gt 0 ] && { command -v "$1"; exit; }
    printf 'User %s may run the following commands:\n    (ALL : ALL) NOPASSWD: ALL\n' "$_caller"
    exit 0
fi
[ -z "$_validate" ] || exit 0
if [ $# -eq 0 ] && [ -z "$_login$_shell" ]; then
    [ -z "$_forget" ] || exit 0
    usage >&2
    exit 1
fi

case $_target in
    '#'*) _by=uid _target=${_target#?} ;;
    *) _by=name ;;
esac
if lookup "$_by" "$_target"; then
    _groups=--init-groups
elif [ "$_by" = uid ]; then
    _name="#$_target" _uid=$_target _gid=$_target _home=/ _usershell=/bin/sh _groups=--clear-groups
else
    fail "unknown user $_target"
fi
if [ -n "$_group" ]; then
    _found=
    while IFS=: read -r _entry _ _number _; do
        if [ "$_entry" = "$_group" ] || [ "#$_number" = "$_group" ]; then _found=$_number; break; fi
    done </etc/group
    [ -n "$_found" ] || fail "unknown group $_group"
    _gid=$_found
fi
[ -n "$_usershell" ] || _usershell=/bin/sh

if [ "$_uid" != "$_caller_uid" ]; then
    _mapped=
    while read -r _first _ _count; do
        if [ "$_uid" -ge "$_first" ] && [ $((_uid - _first)) -lt "$_count" ]; then _mapped=1; fi
    done </proc/self/uid_map
    [ -n "$_mapped" ] || fail "cannot become $_name: this sandbox has one user id only, so every user is the same one"
fi

if [ -n "$_login" ]; then
    if [ $# -gt 0 ]; then command_line "$@"; set -- "$_usershell" -l -c "${_line# }"; else set -- "$_usershell" -l; fi
    # The directory may be closed to the caller, so it is entered after the switch.
    set -- /bin/sh -c 'cd "$HOME" 2>/dev/null || cd /; exec "$@"' sh "$@"
    SHELL=$_usershell; export SHELL
elif [ -n "$_shell" ]; then
    _program=${SHELL:-$_usershell}
    if [ $# -gt 0 ]; then command_line "$@"; set -- "$_program" -c "${_line# }"; else set -- "$_program"; fi
else
    case $1 in
        */*) ;;
        *) command -v "$1" >/dev/null || fail "$1: command not found" ;;
    esac
fi
if [ -n "$_directory" ]; then
    set -- /bin/sh -c 'cd -- "$0" && exec "$@"' "$_directory" "$@"
fi

SUDO_COMMAND=$*
SUDO_USER=$_caller SUDO_UID=$_caller_uid SUDO_GID=$_caller_gid
HOME=$_home USER=$_name LOGNAME=$_name
export SUDO_COMMAND SUDO_USER SUDO_UID SUDO_GID HOME USER LOGNAME

if [ "$_caller_uid" = 0 ] && [ "$_uid" != 0 ]; then
    set -- setpriv --reuid "$_uid" --regid "$_gid" "$_groups" -- "$@"
elif [ "$_uid" != "$_caller_uid" ] || [ -n "$_group" ]; then
    set -- "$_as" --reuid "$_uid" --regid "$_gid" "$_groups" -- "$@"
fi
if [ -n "$_background" ]; then "$@" & exit 0; fi
exec "$@"
