// Where the page is: the part of the URL after `#`, such as `#/rollouts/ro-1/tokens?color=advantage`. Nothing but that
// decides what is shown, so that any view can be linked to, and Back goes back.
import { signal } from "@preact/signals";

export interface Place {
  path: string[];
  query: URLSearchParams;
}

export const place = signal<Place>(read());

function read(): Place {
  const [path = "", query = ""] = location.hash.replace(/^#\/?/, "").split("?", 2);
  return { path: path.split("/").filter(Boolean).map(decode), query: new URLSearchParams(query) };
}

function decode(part: string): string {
  try {
    return decodeURIComponent(part);
  } catch {
    return part; // a `%` somebody typed
  }
}

/** `href("rollouts", id)` → `#/rollouts/ro-1`; what is undefined or empty in `query` is left out. */
export function href(path: string[], query: Record<string, string | undefined> = {}): string {
  const given = Object.entries(query).filter((pair): pair is [string, string] => Boolean(pair[1]));
  const asked = new URLSearchParams(given).toString();
  return `#/${path.map(encodeURIComponent).join("/")}${asked ? `?${asked}` : ""}`;
}

export function go(target: string): void {
  location.hash = target;
}

/** Change some of what the query says, staying in the view: no new entry in the browser's history. */
export function ask(changes: Record<string, string | undefined>): void {
  const { path, query } = place.value;
  history.replaceState(null, "", href(path, { ...Object.fromEntries(query), ...changes }));
  place.value = read();
}

addEventListener("hashchange", () => {
  place.value = read();
});
