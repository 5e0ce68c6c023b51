// Search without a server: browsers refuse workers on file:// pages, so the search runs in a hidden frame.
// The theme's search looks for `IFrameWorker` to find out that it is in one.
(() => {
  if (location.protocol !== "file:") return;
  const inFrame = () => {
    self.importScripts = (...urls) =>
      urls.reduce(
        (before, url) =>
          before.then(
            () =>
              new Promise((resolve, reject) => {
                const script = document.createElement("script");
                script.src = url;
                script.onload = resolve;
                script.onerror = () => reject(new Error(`cannot load ${url}`));
                document.body.append(script);
              }),
          ),
        Promise.resolve(),
      );
    self.postMessage = (data) => frameElement.answer(data);
  };
  window.IFrameWorker = window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      this.frame = document.createElement("iframe");
      this.frame.hidden = true;
      this.frame.answer = (data) => {
        const event = new MessageEvent("message", { data });
        this.dispatchEvent(event);
        this.onmessage?.(event);
      };
      this.loaded = new Promise((resolve) => this.frame.addEventListener("load", resolve, { once: true }));
      this.frame.srcdoc =
        `<body><script>(${inFrame})()</` + `script><script src="${new URL(url, location.href)}"></` + "script></body>";
      document.body.append(this.frame);
    }

    postMessage(data) {
      this.loaded.then(() => this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data })));
    }

    terminate() {
      this.frame.remove();
    }
  };
})();
