package wsdevice_test

import (
	"fmt"
	"runtime"
	"testing"
	"time"

	"github.com/gorilla/websocket"

	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
	"fleetd/internal/racetest"
)

// A connection on which a message and pongs have arrived waits for the next frame on a stack of 2 KB.
func TestStackOfIdleDevice(t *testing.T) {
	racetest.Skip(t, "the size of a stack")
	b := open(t)
	const n = 400
	var conns []*websocket.Conn
	stacks := func() uint64 {
		runtime.GC() // twice, since the first one finds the stacks of goroutines that have ended
		runtime.GC()
		var m runtime.MemStats
		runtime.ReadMemStats(&m)
		return m.StackInuse
	}
	before := stacks()
	for i := range n {
		id := devices.ID(fmt.Sprintf("02:00:00:00:%02x:%02x", i>>8, i&0xff))
		ws, _, err := websocket.DefaultDialer.Dial(b.url, b.header(id, "c1", 0))
		if err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { _ = ws.Close() })
		conns = append(conns, ws)
		for _, text := range []string{`{"type":"hello","version":1,"transport":"websocket"}`, `{"type":"listen","state":"start"}`} {
			if err := ws.WriteMessage(websocket.TextMessage, []byte(text)); err != nil {
				t.Fatal(err)
			}
		}
		if _, _, err := ws.ReadMessage(); err != nil { // the answer to the hello
			t.Fatal(err)
		}
	}
	devicetest.Eventually(t, "all messages are handled", func() bool { return len(b.Seen(devices.EventMessage)) == n })
	for range 3 {
		for _, ws := range conns {
			if err := ws.WriteControl(websocket.PongMessage, nil, time.Time{}); err != nil {
				t.Fatal(err)
			}
		}
		time.Sleep(100 * time.Millisecond) // nothing shows that a pong was handled
	}
	if each := float64(stacks()-before) / n; each > 3<<10 {
		t.Errorf("a connection takes %.0f bytes of stack", each)
	}
}
