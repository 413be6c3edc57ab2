package wsdevice_test

import (
	"bufio"
	"net"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/gorilla/websocket"

	"fleetd/internal/connlimit"
	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
	"fleetd/internal/wsdevice"
)

// A device that sends without end is closed when its grace is over, whatever it sends,
// and is blocked for a while. Other devices are not affected.
func TestFloods(t *testing.T) {
	const grace = time.Second
	b := open(t, func(o *wsdevice.Options) { o.Floods = connlimit.NewFloods(grace) })
	otherScript := devicetest.NewScript()
	other := devices.ID("02:00:00:00:00:09")
	b.frontend().Online(t, other, "c9", otherScript)
	frame := func(kind, text string) []byte { // masked with zeros, as a client must
		return append([]byte{kind[0], 0x80 | byte(len(text)), 0, 0, 0, 0}, text...)
	}
	note := `{"type":"mcp","payload":{"jsonrpc":"2.0","method":"notifications/x"}}`
	for i, c := range []struct {
		name  string
		first []byte
		frame []byte
	}{
		{"notifications", nil, frame("\x81", note)},
		{"answers to nothing", nil, frame("\x81", `{"type":"mcp","payload":{"jsonrpc":"2.0","id":5,"result":{}}}`)},
		{"requests", nil, frame("\x81", `{"type":"mcp","payload":{"jsonrpc":"2.0","id":5,"method":"ping"}}`)},
		{"pings", nil, frame("\x89", "")},
		{"pongs", nil, frame("\x8a", "")},
		{"empty fragments", frame("\x01", ""), frame("\x00", "")},
		{"audio", nil, frame("\x82", "\x00\x02\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x01\xb8")},
	} {
		t.Run(c.name, func(t *testing.T) {
			id := devices.ID("02:00:00:00:01:0" + string(rune('0'+i)))
			ws, _, err := websocket.DefaultDialer.Dial(b.url, b.header(id, "c1", 0))
			if err != nil {
				t.Fatal(err)
			}
			defer func() { _ = ws.Close() }()
			if err := ws.WriteMessage(websocket.TextMessage, []byte(`{"type":"hello","version":1,"transport":"websocket"}`)); err != nil {
				t.Fatal(err)
			}
			go func() { // reads responses
				for {
					if _, _, err := ws.NextReader(); err != nil {
						return
					}
				}
			}()
			var asked, failed atomic.Int32
			stop, stopped := make(chan struct{}), make(chan struct{})
			go func() {
				defer close(stopped)
				pace := time.NewTicker(2 * time.Millisecond)
				defer pace.Stop()
				for {
					select {
					case <-stop:
						return
					case <-pace.C:
					}
					_, err := b.service.CallTool(t.Context(), devices.ToolCall{Principal: devicetest.Admin, Device: other, Tool: "self.audio_speaker.set_volume", Arguments: []byte(`{"volume":5}`)})
					asked.Add(1)
					if err != nil {
						failed.Add(1)
					}
				}
			}()
			begun := time.Now()
			err = inundate(ws.NetConn(), c.first, c.frame, 10*grace)
			took := time.Since(begun)
			close(stop)
			<-stopped
			// security: D17
			if err == nil || took < grace {
				t.Errorf("the flood ended after %v: %v", took, err)
			}
			// One after the other; how many depends on what else the machine does.
			if asked.Load() < 5 || failed.Load() > 0 {
				t.Errorf("%d of %d calls of another device failed", failed.Load(), asked.Load())
			}
			devicetest.Eventually(t, "it counts as a flood", func() bool {
				for _, e := range b.Seen(devices.EventOffline) {
					if e.Device == id && strings.Contains(string(e.Fields), string(devices.CloseFlooding)) {
						return true
					}
				}
				return false
			})
			// security: D17
			if _, response, err := websocket.DefaultDialer.Dial(b.url, b.header(id, "c1", 0)); err == nil || response.StatusCode != 429 || response.Header.Get("Retry-After") != "10" {
				t.Errorf("it can reconnect at once: %v", err)
			}
		})
	}
}

// inundate writes the frame repeatedly, until the server closes the connection or the
// time is over.
func inundate(conn net.Conn, first, frame []byte, limit time.Duration) error {
	w := bufio.NewWriterSize(conn, 16<<10)
	deadline := time.Now().Add(limit)
	_ = conn.SetWriteDeadline(deadline.Add(limit))
	_, err := w.Write(first)
	for n := 0; err == nil && time.Now().Before(deadline); n++ {
		_, err = w.Write(frame)
	}
	return err
}
