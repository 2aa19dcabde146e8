// Search in pages that were opened as files. The theme searches in a Worker, and browsers start none from file://.
// There this class stands in: it runs the same script in a hidden frame, and hands messages to and fro.
if (location.protocol === "file:") {
  window.Worker = window.IFrameWorker = class extends EventTarget {
    constructor(url) {
      super()
      this.waiting = []
      this.frame = document.createElement("iframe")
      this.frame.hidden = true
      document.body.appendChild(this.frame)
      const inside = this.frame.contentWindow
      inside.postMessage = data => this.dispatchEvent(new MessageEvent("message", { data }))
      inside.importScripts = async (...urls) => {
        for (const each of urls) await this.load(each)
      }
      this.load(url).then(() => {
        const waiting = this.waiting
        this.waiting = null
        waiting.forEach(data => this.postMessage(data))
      })
    }

    load(url) {
      const inside = this.frame.contentDocument
      return new Promise((resolve, reject) => {
        const script = inside.createElement("script")
        script.onload = resolve
        script.onerror = reject
        script.src = url
        inside.body.appendChild(script)
      })
    }

    postMessage(data) {
      if (this.waiting) this.waiting.push(data)
      else this.frame.contentWindow.dispatchEvent(new MessageEvent("message", { data }))
    }

    terminate() {
      this.frame.remove()
    }
  }
}
