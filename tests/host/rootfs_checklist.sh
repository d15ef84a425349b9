#!/bin/sh
# What clients rely on in a root filesystem, asked from inside as the default user.
# Prints one line per item that does not hold and exits with 1 if there is any.
# Arguments: further programs that must be on PATH (node, npm, git ... depend on the image).

failed=0
bad() {
    printf '%s\n' "$*"
    failed=1
}
check() { # description, then a command that must succeed quietly
    _what=$1
    shift
    "$@" >/dev/null 2>&1 || bad "$_what"
}
is() { # description, expected, actual
    [ "$2" = "$3" ] || bad "$1: expected '$2', got '$3'"
}

ids=0
while read -r _ _ count; do ids=$((ids + count)); done </proc/self/uid_map

# --- who and where
is 'the working directory' /workspace "$(pwd)"
is 'owner of the working directory' "$(id -u)" "$(stat -c %u /workspace)"
check 'the working directory is writable' sh -c 'd=$(mktemp -d /workspace/checkXXXXXX) && rmdir "$d"'
check 'HOME exists and is writable' test -w "$HOME"
check 'the default user has a passwd row' getent passwd "$(id -un)"
check 'id -gn names a group' sh -c 'test -n "$(id -gn)"'
[ "$ids" -eq 1 ] || [ "$(id -u)" -ne 0 ] || bad 'the default user is root'
for directory in /home /root /tmp /var/tmp /run; do check "$directory exists" test -d "$directory"; done
is 'mode of /tmp' 1777 "$(stat -c %a /tmp)"
check '/tmp is writable' sh -c 'f=$(mktemp) && rm "$f"'
case ":$PATH:" in *:"$HOME"/.local/bin:*) ;; *) bad 'PATH lacks ~/.local/bin' ;; esac
case ":$PATH:" in *:/usr/local/bin:*) ;; *) bad 'PATH lacks /usr/local/bin' ;; esac

# --- programs, as files rather than shell built-ins
for program in test ls stat rm rmdir mv cp mkdir chmod chown ln readlink realpath truncate mktemp base64 id \
    printf cat env sleep find getent useradd groupadd usermod gpasswd sudo setpriv bash sh tar gzip "$@"; do
    found=
    IFS=:
    for directory in $PATH; do [ -x "$directory/$program" ] && found=1 && break; done
    unset IFS
    [ -n "$found" ] || bad "no program $program on PATH"
done
for path in /bin/sh /bin/bash /usr/bin/env /usr/bin/setpriv /usr/bin/sleep; do check "$path exists" test -x "$path"; done
check 'bash is 4 or newer' bash -c '[ "${BASH_VERSINFO[0]}" -ge 4 ]'
check 'bash has coproc and job control' bash -c 'set -m; coproc cat; kill %1'
check 'env --default-signal works' /usr/bin/env --default-signal=PIPE true
check 'setpriv --pdeathsig works' /usr/bin/setpriv --pdeathsig KILL true
check 'setpriv --pdeathsig takes a real-time signal' /usr/bin/setpriv --pdeathsig RTMAX-0 true
check 'sleep takes fractions' /usr/bin/sleep 0.01
check 'find -printf works' find / -maxdepth 0 -printf '%f|%y\n'
is 'stat -c format' '13' "$(stat -c '%s|%f|%u|%g|%X|%Y|%Z|%W|%h|%i|%d|%B|%b' / | tr '|' '\n' | wc -l | tr -d ' ')"
check 'base64 -w 0 works' base64 -w 0 -- /etc/passwd

# --- messages are English
case $(ls /no/such 2>&1) in *'No such file or directory'*) ;; *) bad 'ENOENT is not spelled in English' ;; esac
case $(rmdir /home 2>&1) in *'not empty'* | *'Permission denied'*) ;; *) bad 'ENOTEMPTY is not spelled in English' ;; esac
case $(ln -s x /tmp 2>&1; ln -s x /tmp/x 2>&1; rm -f /tmp/x) in *'File exists'*) ;; *) bad 'EEXIST is not spelled in English' ;; esac

# --- names
is 'hostname' sandbox "$(cat /etc/hostname)"
check 'localhost resolves' getent hosts localhost
check 'the host name resolves' getent hosts sandbox
check '/etc/resolv.conf names a server' grep -q '^nameserver ' /etc/resolv.conf

# --- certificates, where the image has any
if [ -d /usr/share/ca-certificates ]; then
    check 'a certificate bundle exists' test -s /etc/ssl/certs/ca-certificates.crt
fi

# --- sudo
is 'sudo id -u' 0 "$(sudo id -u 2>&1)"
is 'sudo -n' 0 "$(sudo -n id -u 2>&1)"
is 'sudo sets HOME' /root "$(sudo sh -c 'echo $HOME' 2>&1)"
is 'sudo sets USER' root "$(sudo sh -c 'echo $USER' 2>&1)"
[ "$ids" -eq 1 ] || is 'sudo sets SUDO_USER' "$(id -un)" "$(sudo sh -c 'echo $SUDO_USER' 2>&1)"
is 'sudo keeps PATH' "$PATH" "$(sudo sh -c 'echo $PATH' 2>&1)"
is 'sudo keeps the environment' kept "$(name=kept sudo sh -c 'echo $name' 2>&1)"
is 'sudo VAR=value' 'one two' "$(sudo A='one two' sh -c 'echo $A' 2>&1)"
is 'sudo passes the exit code' 7 "$(sudo sh -c 'exit 7'; echo $?)"
is 'sudo of a missing command fails' 1 "$(sudo no-such-program 2>/dev/null; echo $?)"
is 'sudo -i goes home' /root "$(sudo -i pwd 2>&1)"
is 'sudo -s runs a command' 'a  b' "$(sudo -s echo 'a  b' 2>&1)"
is 'sudo --' 0 "$(sudo -- id -u 2>&1)"
is 'sudo -E -H' 0 "$(sudo -EH id -u 2>&1)"
check 'sudo -v is harmless' sudo -v
check 'sudo -l is harmless' sudo -l
check 'sudo -k is harmless' sudo -k
check 'sudo -V prints a version' sudo -V
is 'sudo inside sudo' 0 "$(sudo sudo id -u 2>&1)"
check 'root may create /shared' sudo mkdir -p /shared/checklist
sudo rm -r /shared/checklist

# --- users and groups, where there is more than one id
if [ "$ids" -gt 1 ]; then
    user=check$$ group=checkers$$
    check 'useradd' sudo useradd -m -s /bin/bash "$user"
    is 'useradd of an existing user' 9 "$(sudo useradd -m -s /bin/bash "$user" >/dev/null 2>&1; echo $?)"
    is 'passwd row fields' 7 "$(getent passwd "$user" | tr ':' '\n' | wc -l | tr -d ' ')"
    is 'sudo -u' "$user" "$(sudo -u "$user" -- bash -c 'id -un' 2>&1)"
    is 'sudo -iu' "/home/$user" "$(sudo -iu "$user" pwd 2>&1)"
    is 'sudo --user=' "/home/$user" "$(sudo --user="$user" sh -c 'echo $HOME' 2>&1)"
    check 'groupadd' sudo groupadd "$group"
    check 'usermod -aG' sudo usermod -aG "$group" "$user"
    case " $(sudo -u "$user" id -Gn 2>&1) " in *" $group "*) ;; *) bad 'a new membership is not seen by the next command' ;; esac
    check 'gpasswd -d' sudo gpasswd -d "$user" "$group"
    case " $(sudo -u "$user" id -Gn 2>&1) " in *" $group "*) bad 'an ended membership is still there' ;; esac
    check 'a non-member may not sudo' sh -c "! sudo -u $user sudo -n true"
    check 'chown to another user' sudo sh -c "touch /tmp/$user && chown $user:$group /tmp/$user && rm /tmp/$user"
    is 'setpriv as root' "$user" "$(sudo /usr/bin/setpriv --pdeathsig KILL --reuid "$user" --regid "$(id -g "$user")" --init-groups -- /usr/bin/env -- id -un 2>&1)"
    sudo install -m 0600 -o "$user" /dev/null "/home/$user/private"
    check "another user's 0600 file is closed" sh -c "! cat /home/$user/private"
    check 'userdel' sudo sh -c "userdel -r $user 2>/dev/null; groupdel $group"
fi
exit $failed
