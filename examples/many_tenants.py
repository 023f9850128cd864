"""Serve several tenants whose caches must not meet: each has a cache_salt, and finds only what it brought itself.

    python examples/many_tenants.py --tenants 3

Every tenant sends the same prompt twice. The second time it comes out of the tenant's own cache; the first time nothing
does, although other tenants have just sent the very same text. So no tenant can learn from the cache what another one
has asked, be it by cached_tokens or by how long a prompt takes.
"""

from __future__ import annotations

import argparse
import os
import secrets
import sys
from typing import NamedTuple

from openai import OpenAI, OpenAIError

CONTRACT = "\n".join(
    f"{number}. The {party} shall {duty} within {number * 7} days, unless the parties agree otherwise in writing."
    for number, (party, duty) in enumerate(
        [
            ("seller", "deliver the goods"),
            ("buyer", "inspect the goods"),
            ("buyer", "pay the price"),
            ("seller", "replace what is broken"),
            ("carrier", "report what is lost"),
            ("insurer", "answer for what is lost"),
        ],
        start=1,
    )
)


class Tenant(NamedTuple):
    """Somebody whose cache is their own.

    Attributes:
        name: for the table.
        cache_salt: what keeps it apart. It is a secret: who knows it shares the cache. A client could send any, so a
            gateway that knows its users sets it, and throws away what they send.
    """

    name: str
    cache_salt: str


def main() -> int:
    """Run the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000/v1", help="the server (default: %(default)s)")
    parser.add_argument("--model", help="its model; the one it serves if not given")
    parser.add_argument("--tenants", type=int, default=3, help="(default: %(default)s)")
    args = parser.parse_args()
    client = OpenAI(base_url=args.url, api_key=os.environ.get("OPENAI_API_KEY", "none"))
    tenants = [Tenant(f"tenant {number}", secrets.token_hex(16)) for number in range(1, args.tenants + 1)]
    try:
        model = args.model or client.models.list().data[0].id
        first = [cached_tokens(client, model, tenant) for tenant in tenants]
        second = [cached_tokens(client, model, tenant) for tenant in tenants]
    except OpenAIError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(f"{'':10}  cached tokens, first time  second time")
    for tenant, before, after in zip(tenants, first, second, strict=True):
        print(f"{tenant.name:10}  {before:25}  {after:11}")
    if any(first):
        print("A tenant found what it had not brought: this must never be.", file=sys.stderr)
        return 1
    return 0


def cached_tokens(client: OpenAI, model: str, tenant: Tenant) -> int:
    """Ask about the contract for ``tenant``; return how many tokens of the prompt its cache had."""
    response = client.chat.completions.create(
        model=model,
        messages=[{"role": "user", "content": f"{CONTRACT}\n\nWho pays?"}],
        max_tokens=8,
        temperature=0,
        extra_body={"cache_salt": tenant.cache_salt},
    )
    assert response.usage is not None
    assert response.usage.prompt_tokens_details is not None
    return response.usage.prompt_tokens_details.cached_tokens or 0


if __name__ == "__main__":
    sys.exit(main())
