// What this browser remembers of the viewer's choices: sets of names.
import { type Signal, signal } from "@preact/signals";

export interface Remembered {
  names: Signal<string[]>;
  toggle: (name: string) => void;
}

/** A set of names under a key; `initial` until something was chosen. */
export function remembered(key: string, initial: string[]): Remembered {
  const names = signal(read(key) ?? initial);
  const toggle = (name: string) => {
    const kept = names.value.filter((one) => one !== name);
    names.value = kept.length < names.value.length ? kept : [...kept, name];
    localStorage.setItem(key, JSON.stringify(names.value));
  };
  return { names, toggle };
}

function read(key: string): string[] | undefined {
  try {
    const found: unknown = JSON.parse(localStorage.getItem(key) ?? "null");
    return Array.isArray(found) ? found.map(String) : undefined;
  } catch {
    return undefined; // somebody else wrote it
  }
}
