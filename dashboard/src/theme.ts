// Light or dark: as the system says, until the viewer says otherwise, which this browser remembers.
import { signal } from "@preact/signals";

export type Theme = "light" | "dark";

const KEY = "agentlightning.theme";
const dark = matchMedia("(prefers-color-scheme: dark)");

function chosen(): Theme | null {
  const kept = localStorage.getItem(KEY);
  return kept === "light" || kept === "dark" ? kept : null;
}

export const theme = signal<Theme>(chosen() ?? (dark.matches ? "dark" : "light"));

dark.addEventListener("change", () => {
  theme.value = chosen() ?? (dark.matches ? "dark" : "light");
});

theme.subscribe((now) => {
  document.documentElement.dataset["theme"] = now;
});

export function switchTheme(): void {
  theme.value = theme.value === "dark" ? "light" : "dark";
  localStorage.setItem(KEY, theme.value);
}

const resolved = new Map<string, string>();

/** The colour a custom property such as `--accent` stands for now: canvases take no `light-dark()`. */
export function color(name: string): string {
  const key = `${theme.value} ${name}`;
  const known = resolved.get(key);
  if (known !== undefined) return known;
  const probe = document.createElement("i");
  probe.style.color = `var(${name})`;
  document.body.append(probe);
  const found = getComputedStyle(probe).color;
  probe.remove();
  resolved.set(key, found);
  return found;
}

export const SERIES = Array.from({ length: 8 }, (_, place) => `--series-${place}`);
