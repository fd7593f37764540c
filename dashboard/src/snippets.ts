// An LLM call of a rollout as a command or a program that asks the same again. Pure. The key is never in it: it is read
// from the environment.
import type { ReplayRequest } from "./api";

function url(request: ReplayRequest): string {
  return new URL(request.path.replace(/^\//, ""), location.origin + location.pathname).href;
}

export function curl(request: ReplayRequest): string {
  const body = JSON.stringify(request.body, null, 2).replaceAll("'", `'\\''`);
  return [
    `curl '${url(request).replaceAll("'", "%27")}' \\`,
    `  -H "Authorization: Bearer $AGL_KEY" \\`,
    `  -H 'Content-Type: application/json' \\`,
    `  -d '${body}'`,
  ].join("\n");
}

export function python(request: ReplayRequest): string {
  // A JSON text inside a JSON text is a Python literal too.
  return [
    "import json, os, urllib.request",
    "",
    `body = json.loads(${JSON.stringify(JSON.stringify(request.body))})`,
    "request = urllib.request.Request(",
    `    ${JSON.stringify(url(request))},`,
    "    data=json.dumps(body).encode(),",
    '    headers={"Authorization": f"Bearer {os.environ[\'AGL_KEY\']}", "Content-Type": "application/json"},',
    ")",
    "print(json.load(urllib.request.urlopen(request)))",
  ].join("\n");
}
