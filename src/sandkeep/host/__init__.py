"""The host layer: everything that runs sessions on one machine.

``driver``   the interface an isolation technology offers, and the values that cross it
``rootfs``   what a root filesystem is made of
``images``   where root filesystems come from
``layers``   what sessions leave behind: layers, chains, folding, deletion
``native``   the namespaces driver: zygote, boot, init
``worker``   the process that does bulk disk work on behalf of callers
``doctor``   what this machine can and cannot do
"""
