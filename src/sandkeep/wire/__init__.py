"""JSON as clients spell it, to and from the values the rest of the program works with.

This is the only package that knows that spelling. It does no I/O and holds no state.

- ``base``: how structs are named, decoded strictly with the field named in the error, and encoded
- ``bodies``: what requests carry         - ``queries``: what their query strings carry
- ``objects``: resources in responses     - ``responses``: what wraps them
- ``policies``: the request forms of a network policy, and the redacted form it is shown in
- ``streams``: NDJSON records and the text of output   - ``frames``: output byte for byte
- ``terminal``: messages of an interactive session
- ``errors``: one envelope, and the code and status of every error the program raises
- ``openapi``: the document describing all of it, made from the same structs

Unknown keys are ignored everywhere. Optional fields of responses are left out, never null; the two
exceptions are ``exitCode`` and ``pagination.next``. Times and durations are integer milliseconds.
"""
