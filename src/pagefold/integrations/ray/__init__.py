"""Many servers on Ray Serve: replicas of the same server, one address, requests routed by what each replica holds.

::

    client -> Ray's HTTP proxy -> PagefoldIngress -> (Router chooses) -> PagefoldReplica -> pagefold serve

``front.py`` is what the ingress does, and knows no Ray. ``application.py`` puts it together.
"""
