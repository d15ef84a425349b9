"""JSON as clients spell it, converted to and from the values that the rest of the program uses.

This is the only package that knows that spelling. It does no I/O and holds no state.

``base``       how structs are named, decoded strictly with the field named in the error, and encoded
``bodies``     what requests carry, and the values they mean
``paths``      what requests carry that name a path inside a sandbox
``queries``    what query strings carry
``objects``    resources in responses
``responses``  what wraps the resources in the response to each request
``v1``         requests and responses of our own routes, which official clients do not know
``policies``   network policies: the forms a client may send, the stored form, the redacted form
``images``     bodies of the routes below ``/v1/images``
``image_config``  what an image's author configured
``secrets``    bodies of the routes below ``/v1/secrets``
``tokens``     bodies of the routes below ``/v1/server/tokens``
``repairs``    bodies of the routes about damage and its repair
``streams``    NDJSON records, and a process's output as text
``frames``     output frames: a process's output byte for byte
``terminal``   messages of an interactive terminal
``tunnel``     messages of a connection to a port
``errors``     one envelope, and the code and status of every error the program raises
``openapi``    the document that describes all of it, made from the same structs

Unknown keys are ignored everywhere. Optional fields of responses are left out, never null; the two
exceptions are ``exitCode`` and ``pagination.next``. Times and durations are integer milliseconds.
"""
