//go:build bench

package browser

import (
	"encoding/json"
	"fmt"
	"os"
	"strconv"
	"sync"
	"testing"
	"time"

	"github.com/chromedp/cdproto/cdp"
	"github.com/chromedp/cdproto/tracing"
	"github.com/chromedp/chromedp"

	"fleetd/internal/fleettest"
)

// TestBench measures the console with a large fleet for make bench: FLEETD_TEST_BENCH_DEVICES devices, and the figures as JSON
// in the file FLEETD_TEST_BENCH_OUT. the module bench has the goals.
func TestBench(t *testing.T) {
	devices, err := strconv.Atoi(os.Getenv("FLEETD_TEST_BENCH_DEVICES"))
	out := os.Getenv("FLEETD_TEST_BENCH_OUT")
	if err != nil || devices < 500 || out == "" {
		t.Fatalf("FLEETD_TEST_BENCH_DEVICES must be 500 or more, and FLEETD_TEST_BENCH_OUT a file: %v", err)
	}
	const storms = 3
	b := start(t)
	n := programs.Start(t)
	connect := func() *fleettest.Simulation {
		t.Helper()
		s := programs.Simulate(t, n.Info.OTA, "--devices", fmt.Sprint(devices), "--ramp", "1000/s", "--transport", "mqtt", "--quiet")
		n.Await(t, "the fleet is ready", 5*time.Minute, func() bool { return n.Metric(t, "fleetd_devices", `mcp_state="ready"`) == float64(devices) })
		return s
	}
	running := connect()
	n.AwaitStored(t)
	figures := map[string]float64{}

	const noted = `{ const rows = () => document.querySelectorAll('tbody tr').length; new MutationObserver(() => { if (rows() === 100) window.first ??= performance.now(); }).observe(document, { childList: true, subtree: true }); }`
	p := b.openAt(t, n.Info.API, n.Token(t), "/console/devices", noted)
	p.visit("/console/devices") // loaded once before, as a browser has it
	p.await("window.first > 0")
	figures["first table, ms"] = p.eval("window.first").(float64)
	// after is how long the page takes from an act until something is true.
	after := func(act, until string) float64 {
		t.Helper()
		return p.eval(fmt.Sprintf("new Promise((ok) => { const begun = performance.now(); %s; const look = () => (%s) ? ok(performance.now() - begun) : setTimeout(look, 2); look(); })", act, until)).(float64)
	}
	row := func(i int) string {
		return fmt.Sprintf("document.querySelector('tbody tr')?.dataset.device === '02:f1:ee:00:%02x:%02x'", i/256, i%256)
	}
	const search = "document.querySelector('.search input').value = '02:f1:ee:00:01'; document.querySelector('.search').requestSubmit()"
	figures["filter, ms"] = after(search, row(256)+" && location.search.includes('q=')")
	p.visit("/console/devices")
	last := min(50, devices/100)
	const next = "[...document.querySelectorAll('.pager button')].find((b) => b.textContent === 'Next page').click()"
	for number := 2; number <= last; number++ {
		p.await(row((number-2)*100) + " && [...document.querySelectorAll('.pager button')].some((b) => b.textContent === 'Next page')")
		figures["page 50, ms"] = after(next, row((number-1)*100))
	}
	figures["back, ms"] = after("history.back()", row((last-2)*100))

	p.visit("/console/devices")
	p.counts("online", devices)
	p.live()
	events := b.open(t, n, n.Token(t), "/console/events")
	events.live()
	longest := tasks(p)
	var heaps [2][storms]int
	for storm := range storms {
		running.Report(t)
		p.counts("offline", devices)
		running = connect()
		p.counts("online", devices)
		p.await("document.querySelectorAll('tbody tr .state.online').length === 100")
		heaps[0][storm], heaps[1][storm] = p.heap(), events.heap()
	}
	figures["longest task of the main thread in a storm, ms of CPU"] = longest()
	for i, name := range []string{"table", "events"} {
		figures["growth of the heap of the "+name+" page over three storms, MiB"] = float64(heaps[i][storms-1]-heaps[i][0]) / (1 << 20)
	}
	text, err := json.Marshal(figures)
	if err == nil {
		err = os.WriteFile(out, text, 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
}

// tasks begins to note the tasks of the main threads of all pages, and returns what ends that: the most CPU that one took.
// Collecting garbage before the heap is read is one of them.
func tasks(p *page) func() float64 {
	p.t.Helper()
	var mu sync.Mutex
	main := map[[2]int64]bool{} // process and thread
	type task struct {
		thread [2]int64
		took   float64
	}
	var all []task
	done := make(chan struct{})
	err := chromedp.Listen(p.ctx, func(event any) {
		mu.Lock()
		defer mu.Unlock()
		switch e := event.(type) {
		case *tracing.EventDataCollected:
			for _, value := range e.Value {
				var x struct {
					Name     string  `json:"name"`
					PID      int64   `json:"pid"`
					TID      int64   `json:"tid"`
					Duration float64 `json:"tdur"` // microseconds of CPU
					Args     struct {
						Name string `json:"name"`
					} `json:"args"`
				}
				if json.Unmarshal([]byte(value), &x) != nil {
					continue
				}
				if x.Name == "thread_name" && x.Args.Name == "CrRendererMain" {
					main[[2]int64{x.PID, x.TID}] = true
				} else if x.Duration > 0 {
					all = append(all, task{[2]int64{x.PID, x.TID}, x.Duration / 1000})
				}
			}
		case *tracing.EventTracingComplete:
			close(done)
		}
	})
	if err != nil {
		p.t.Fatal(err)
	}
	command(p, tracing.Start, tracing.StartParams{TraceConfig: &tracing.TraceConfig{IncludedCategories: []string{"toplevel"}, ExcludedCategories: []string{"*"}}})
	return func() (most float64) {
		p.t.Helper()
		command(p, tracing.End, cdp.Empty{})
		select {
		case <-done:
		case <-time.After(time.Minute):
			p.t.Fatal("the browser does not deliver its trace")
		}
		mu.Lock()
		defer mu.Unlock()
		if len(main) == 0 || len(all) == 0 {
			p.t.Fatalf("the trace has %d main threads and %d tasks", len(main), len(all))
		}
		for _, x := range all {
			if main[x.thread] {
				most = max(most, x.took)
			}
		}
		return most
	}
}
