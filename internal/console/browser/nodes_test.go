package browser

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"fleetd/internal/fleettest"
)

// Behind one address of two nodes a page follows the fleet on: one is drained, starts again, and the other is killed. What
// a node that does not answer would have added is named.
func TestNodesComeAndGo(t *testing.T) {
	long(t)
	t.Parallel()
	b := start(t)
	c := programs.StartCluster(t, fleettest.ClusterOptions{Nodes: 2, Seed: 43})
	programs.Simulate(t, c.OTA, "--devices", "4", "--transport", "mqtt", "--reconnect", "1s", "--quiet")
	c.AwaitReady(t, 4, time.Minute)
	c.Nodes[0].AwaitReady(t, 4) // it has the lease of the other node
	var apis []string
	for _, n := range c.Nodes {
		apis = append(apis, strings.TrimPrefix(n.Info.API, "http://"))
	}
	balancer := fleettest.NewWire(t, 7, apis...)
	reach := func(node int, fault fleettest.Fault) { // all ways to a node
		for _, w := range []*fleettest.Wire{balancer, c.HTTP, c.MQTT} {
			w.Break(node, fault)
		}
	}
	balancer.Break(1, fleettest.Cut)
	p := b.openAt(t, "http://"+balancer.Address(), c.Nodes[0].Token(t), "/console/devices")
	p.rowSays(first, "online")
	p.live()

	// The first is drained: the balancer sends to the second.
	streams := p.sent("GET /v1/events")
	balancer.Break(1, fleettest.None)
	reach(0, fleettest.Cut)
	c.Nodes[0].Stop(t)
	c.Nodes[1].Await(t, "another stream", wait, func() bool { return p.sent("GET /v1/events") > streams })
	p.live()
	for i := range 4 {
		p.rowSays(fmt.Sprintf("02:f1:ee:00:00:%02x", i), "online")
	}
	for i := range 4 {
		p.visit(fmt.Sprintf("/console/devices/02:f1:ee:00:00:%02x", i))
		p.shows("node-1")
	}
	p.live() // the last page has its stream before another node could give it one
	c.Nodes[0].Run(t)
	reach(0, fleettest.None)

	// The second is killed, and its devices reach no other. What it recorded is missing, and it is named.
	streams = p.sent("GET /v1/events")
	balancer.Break(1, fleettest.Cut)
	c.Nodes[0].Await(t, "another stream", wait, func() bool { return p.sent("GET /v1/events") > streams })
	p.live()
	c.HTTP.Break(0, fleettest.Cut)
	c.MQTT.Break(0, fleettest.Cut)
	c.Nodes[1].Kill(t)
	p.visit("/console/stats")
	p.await("document.querySelector('main .notice.warn')?.innerText.includes('node-1')")
	p.visit("/console/devices/" + first)
	p.await("document.querySelector('[data-test=explain]')?.innerText.includes('The node that held it was lost')")
	p.await("/did not answer.*node-1/.test(document.querySelector('[data-test=explain]')?.innerText)")
	p.forgive() // connections that the test closed
}

// Without NATS the page of nodes names that, and the table goes on when it is back.
func TestNATSAway(t *testing.T) {
	long(t)
	t.Parallel()
	b := start(t)
	c := programs.StartCluster(t, fleettest.ClusterOptions{Nodes: 2, Seed: 44})
	programs.Simulate(t, c.OTA, "--devices", "4", "--quiet")
	c.AwaitReady(t, 4, time.Minute)
	n := c.Nodes[0]
	p := b.open(t, n, n.Token(t), "/console/nodes")
	p.expect(503)
	p.shows("This node is ready.")
	p.await("document.querySelectorAll('main tbody tr').length === 2")
	c.NATS[0].Break(0, fleettest.Cut)
	p.await("/This node is not ready:.*nats/.test(document.body.innerText)")
	p.visit("/console/devices")
	p.rowSays(first, "02:f1")
	c.NATS[0].Break(0, fleettest.None)
	p.live()
	p.visit("/console/nodes")
	p.shows("This node is ready.")
	visitor := programs.Simulate(t, c.OTA, "--devices", "1", "--mac-base", "02:f1:ee:00:00:10", "--quiet")
	c.AwaitReady(t, 5, time.Minute) // a page that was loaded before it came offers to load the list again
	p.visit("/console/devices")
	p.rowSays("02:f1:ee:00:00:10", "online")
	p.live()
	visitor.Report(t)
	p.rowSays("02:f1:ee:00:00:10", "offline")
}

// An event may come before what it says is in the database: the page of a device reads once more.
func TestAnswerOlderThanItsEvent(t *testing.T) {
	long(t)
	t.Parallel()
	b := start(t)
	n := programs.Start(t)
	simulated := programs.Simulate(t, n.Info.OTA, "--devices", "1", "--quiet")
	n.AwaitReady(t, 1)
	page := "/v1/devices/" + first
	request, err := http.NewRequestWithContext(t.Context(), http.MethodGet, n.Info.API+page, nil)
	if err != nil {
		t.Fatal(err)
	}
	request.Header.Set("Authorization", "Bearer "+n.Token(t))
	answer, err := http.DefaultClient.Do(request)
	if err != nil {
		t.Fatal(err)
	}
	online, err := io.ReadAll(answer.Body)
	if err := errors.Join(err, answer.Body.Close()); err != nil {
		t.Fatal(err)
	}
	var older atomic.Int32 // answers that are still as before the event
	front := before(t, n, func(w http.ResponseWriter, r *http.Request) bool {
		if r.URL.Path != page || older.Add(-1) < 0 {
			return false
		}
		w.Header().Set("Content-Type", "application/json")
		_, _ = w.Write(online) // the browser is gone if this fails
		return true
	})
	p := b.openAt(t, front.URL, n.Token(t), "/console/devices/"+first)
	p.shows("online")
	p.live()
	older.Store(1)
	simulated.Report(t)
	p.await("document.querySelector('main h1').parentElement.innerText.includes('offline')")
	if older.Load() >= 0 {
		t.Error("no older answer was given")
	}
}

// When events are missing, the page and the counts are loaded again; a page that loads for long shows that, and not
// before 0.3 s.
func TestMissingEventsAndLoading(t *testing.T) {
	long(t)
	t.Parallel()
	b := start(t)
	n := fleet(t, 1)
	var gap atomic.Bool
	held := make(chan struct{})
	front := before(t, n, func(w http.ResponseWriter, r *http.Request) bool {
		switch {
		case r.URL.Path == "/v1/events" && gap.CompareAndSwap(true, false):
			_, _ = io.WriteString(w, "event: gap\ndata: {}\n\n") // the browser is gone if this fails
			return true
		case r.URL.Path == "/v1/devices" && r.URL.Query().Get("sort") == "name":
			<-held
		}
		return false
	})
	// When the sign is shown, and how long after the request.
	p := b.openAt(t, front.URL, n.Token(t), "/console/devices", `{
		const real = window.fetch;
		window.fetch = (url, ...rest) => { if (String(url).includes('sort=name')) window.asked = performance.now(); return real(url, ...rest); };
		new MutationObserver(() => { if (document.body?.innerText.includes('Loading')) window.shown ??= performance.now(); }).observe(document, { childList: true, subtree: true });
	}`)
	p.rowSays(first, "online")
	p.live()
	lists, counts := p.sent("GET /v1/devices"), p.sent("GET /v1/fleet")
	gap.Store(true)
	front.CloseClientConnections()
	n.Await(t, "the page is loaded again", wait, func() bool { return p.sent("GET /v1/devices") > lists && p.sent("GET /v1/fleet") > counts })
	p.live()

	p.visit("/console/devices?sort=name")
	p.shows("Loading")
	if after := p.number("Math.ceil(window.shown - window.asked)"); after < 300 {
		t.Errorf("the sign came after %d ms", after)
	}
	close(held)
	p.rowSays(first, "online")
	p.await("!document.body.innerText.includes('Loading')")
	p.forgive() // connections that the test closed
}
