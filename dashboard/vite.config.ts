import { defineConfig } from "vite";

// Relative URLs, so that the page also works below a path of a proxy. No source maps and no inlined assets: what is
// committed stays small, and the page's content-security policy allows files of its own server only.
export default defineConfig({
  base: "./",
  build: {
    outDir: "../agentlightning/dashboard/static",
    emptyOutDir: true,
    assetsInlineLimit: 0,
    modulePreload: { polyfill: false },
    target: "es2022",
  },
  server: { proxy: { "/api": "http://127.0.0.1:8123" } },
});
