// Requests to the server the page came from, and what their failure means to a person.
import { signal } from "@preact/signals";
import { useCallback, useEffect, useRef, useState } from "preact/hooks";
import { type Happened, useLive } from "./live";

/** A typed refusal of the server, whose message says what was wrong and what to do. */
export class Refused extends Error {
  constructor(
    readonly status: number,
    message: string,
  ) {
    super(message);
  }
}

/** Set when the server wants a key before it says anything. */
export const locked = signal(false);

export async function request<T>(method: string, path: string, body?: unknown, signal?: AbortSignal): Promise<T> {
  let answer: Response;
  try {
    answer = await fetch(`api/v1/${path}`, {
      method,
      signal: signal ?? null,
      headers: { accept: "application/json", "content-type": "application/json" },
      body: body === undefined ? null : JSON.stringify(body),
    });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new Refused(0, "the server does not answer; is it running?");
  }
  const text = await answer.text();
  if (!answer.ok) {
    if (answer.status === 401) locked.value = true;
    throw new Refused(answer.status, messageOf(text) ?? `the server answered ${answer.status}`);
  }
  return (text ? JSON.parse(text) : undefined) as T;
}

export function messageOf(text: string): string | undefined {
  try {
    return (JSON.parse(text) as { error?: { message?: string } }).error?.message;
  } catch {
    return undefined; // not from our server: a proxy's page
  }
}

export const get = <T>(path: string, signal?: AbortSignal) => request<T>("GET", path, undefined, signal);

/** `query({a: "x", b: undefined})` → `?a=x` */
export function query(fields: Record<string, string | number | boolean | null | undefined>): string {
  const given = Object.entries(fields).filter(([, value]) => value !== undefined && value !== null && value !== "");
  return given.length ? `?${new URLSearchParams(given.map(([name, value]) => [name, String(value)]))}` : "";
}

export interface Loaded<T> {
  data: T | undefined;
  error: Refused | undefined;
  loading: boolean;
  reload: () => void;
}

/** What `load` brings, loaded anew when `key` changes or when something happened that `matters`. What was there stays
 * until the new is there; undefined as a key loads nothing. */
export function useLoaded<T>(
  key: string | undefined,
  load: (signal: AbortSignal) => Promise<T>,
  matters: (happened: Happened) => boolean = () => false,
): Loaded<T> {
  const [state, setState] = useState<{ key?: string; data?: T; error?: Refused; loading: boolean }>({ loading: true });
  const latest = useRef(load);
  latest.current = load;
  const under = useRef<AbortController | undefined>(undefined);
  const reload = useCallback(() => {
    under.current?.abort();
    if (key === undefined) return;
    const mine = (under.current = new AbortController());
    setState((before) => ({ ...before, loading: true }));
    latest.current(mine.signal).then(
      (data) => !mine.signal.aborted && setState({ key, data, loading: false }),
      (error: unknown) => {
        if (mine.signal.aborted) return;
        if (!(error instanceof Refused)) throw error;
        setState((before) => ({ ...(before.key === key ? before : {}), error, loading: false }));
      },
    );
  }, [key]);
  useEffect(() => {
    reload();
    return () => under.current?.abort();
  }, [reload]);
  useLive((happened) => key !== undefined && matters(happened), reload);
  return { data: state.key === key ? state.data : undefined, error: state.error, loading: state.loading, reload };
}

/** `useLoaded` of what is at a path. */
export function useGet<T>(path: string | undefined, matters?: (happened: Happened) => boolean): Loaded<T> {
  return useLoaded(path, (signal) => get<T>(path ?? "", signal), matters);
}
