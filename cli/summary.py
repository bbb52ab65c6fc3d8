"""What a newcomer reads when the stack is ready: where it is, and a request to paste."""

from cli.place import shown
from local.layout import Layout

TEXT = """
Headworks is ready.

  gateway         {gateway}
  control plane   {control_plane}
  demo key        {key_file}
  admin token     {token_file}

Try it:

  curl -sN {gateway}/v1/chat/completions \\
    -H "Authorization: Bearer $(cat {key_file})" \\
    -H "Content-Type: application/json" \\
    -d '{{"model": "smollm2-135m-instruct", "stream": true,
         "messages": [{{"role": "user", "content": "What is the capital of France?"}}]}}'

Stop with Ctrl-C or `make down`; data stays in {data}.
"""


def show(layout: Layout, gateway_url: str, control_plane_url: str) -> None:
    """Print it."""
    print(
        TEXT.format(
            gateway=gateway_url,
            control_plane=control_plane_url,
            key_file=shown(layout.demo_key),
            token_file=shown(layout.admin_token),
            data=shown(layout.root),
        ),
        flush=True,
    )
