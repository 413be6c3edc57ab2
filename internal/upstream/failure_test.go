package upstream

import (
	"bytes"
	"context"
	"fmt"
	"net"
	"net/http"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"
	"time"

	"github.com/gorilla/websocket"

	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
)

func (d *device) goodbye() string { return `{"type":"goodbye","session_id":"` + d.c.ID() + `"}` }

// A chat server disconnects in the middle of a sentence: the received speech is played, the
// speech is ended, then one goodbye is sent; the next hello works.
func TestKilledMidSentence(t *testing.T) {
	t.Parallel()
	c := server(t)
	f := newFleet(t, c)
	d, p := f.conversation(c, devices.TransportMQTT)
	p.send(chatStart)
	want := []string{d.message(`"type":"tts","state":"start"`)}
	for n := range 20 { // 1.2 s
		p.play(devicetest.Packet(n))
		want = append(want, string(devicetest.Packet(n)))
	}
	_ = p.ws.NetConn().(*net.TCPConn).SetLinger(0)
	devicetest.Eventually(t, "all is passed on", func() bool { return f.bridge.Frames.Get(Down) == 20 })
	_ = p.ws.NetConn().Close()
	d.expect(t, append(want, d.message(`"type":"tts","state":"stop"`), d.goodbye())...)
	devicetest.Eventually(t, "the conversation is closed", d.isClosed)
	if v, err := f.svc.Get(t.Context(), id); err != nil || v.State != devices.StateOnline {
		t.Errorf("the device is %s, %v", v.State, err)
	}
	f.hello(d)
	next := c.open(t)
	d.sendAudio(1)
	if f := next.frame(); !bytes.Equal(f.Opus, devicetest.Packet(1)) {
		t.Errorf("%q", f.Opus)
	}
	if n := len(d.received()); n != len(want)+2 {
		t.Errorf("%d messages were received, want %d", n, len(want)+2)
	}
}

// If a chat server disconnects in a pause, the speech is ended as well.
func TestKilledInAPause(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := pipeServer(t)
		f := newFleet(t, c)
		d, p := f.conversation(c, devices.TransportMQTT)
		p.send(chatStart)
		p.play(devicetest.Packet(0))
		time.Sleep(5 * time.Second) // of the test's own clock
		_ = p.ws.NetConn().Close()
		time.Sleep(time.Second)
		d.expect(t, d.message(`"type":"tts","state":"start"`), string(devicetest.Packet(0)), d.message(`"type":"tts","state":"stop"`), d.goodbye())
	})
}

// A device that is not playing speech is hung up at once, however the chat server ends.
func TestChatServerEnds(t *testing.T) {
	for name, end := range map[string]func(p *peer){
		"goodbye": func(p *peer) { p.send(`{"type":"goodbye","session_id":"theirs"}`) },
		"close": func(p *peer) {
			_ = p.ws.WriteControl(websocket.CloseMessage, websocket.FormatCloseMessage(1000, ""), time.Now().Add(time.Second))
		},
		"broken":    func(p *peer) { _ = p.ws.NetConn().Close() },
		"no frames": func(p *peer) { _, _ = p.ws.NetConn().Write([]byte("\xff\xffnot a frame")) },
		"endless":   func(p *peer) { _, _ = p.ws.NetConn().Write([]byte("\x81\x7f\x00\x00\x00\xff\xff\xff\xff\xff")) },
	} {
		t.Run(name, func(t *testing.T) {
			c := server(t)
			f := newFleet(t, c)
			d, p := f.conversation(c, devices.TransportMQTT)
			end(p)
			d.expect(t, d.goodbye())
			p.ended()
			devicetest.Eventually(t, "it is counted", func() bool { return f.bridge.Connections.Get(Closed) == 1 })
			if n := len(d.received()); n != 1 {
				t.Errorf("%q", d.received())
			}
		})
	}
}

// The wait for the end of the speech stops when the device has stopped playing.
func TestEndOfSpeechIsNotAwaited(t *testing.T) {
	for _, msg := range []string{`{"session_id":"","type":"abort"}`, listenStart} {
		synctest.Test(t, func(t *testing.T) {
			c := pipeServer(t)
			f := newFleet(t, c)
			d, p := f.conversation(c, devices.TransportMQTT)
			p.send(chatStart)
			for n := range 400 { // 24 s
				p.play(devicetest.Packet(n))
			}
			p.send(`{"type":"goodbye"}`)
			synctest.Wait()
			time.Sleep(2 * time.Second) // of the test's own clock
			if d.isClosed() {
				t.Fatal("the speech was interrupted")
			}
			f.send(d, msg)
			synctest.Wait()
			if !d.isClosed() || !slices.Contains(d.received(), d.goodbye()) {
				t.Errorf("after %s it is not hung up", msg)
			}
		})
	}
}

// The chat server is unreachable: over UDP the device gets a goodbye at once; over WebSocket
// the next listen dials again, after a pause.
func TestDialFails(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := pipeServer(t)
		var dials atomic.Int32
		c.refuse = func() int { dials.Add(1); return http.StatusUnauthorized }
		f := newFleet(t, c)
		d := f.connect(devices.TransportMQTT, devicetest.NewScript())
		f.hello(d)
		d.sendAudio(1)
		synctest.Wait()
		d.expect(t, d.goodbye())
		if !d.isClosed() || f.bridge.Connections.Get(DialFailed) != 1 || f.bridge.Connections.Get(Dialled) != 0 {
			t.Error("the conversation is still open")
		}
		d.session.Close(devices.CloseGone)

		w := f.connect(devices.TransportWebSocket, devicetest.NewScript())
		f.hello(w)
		synctest.Wait()
		for n, pause := range []time.Duration{1, 2, 4, 8, 16, 30, 30} {
			pause *= time.Second
			f.send(w, listenStart)
			f.send(w, listenStart)
			time.Sleep(pause - time.Millisecond) // of the test's own clock
			synctest.Wait()
			if got := dials.Load(); got != int32(n+2) {
				t.Fatalf("listen %d dials before a pause of %v", n, pause)
			}
			time.Sleep(time.Millisecond)
			synctest.Wait()
			if got := dials.Load(); got != int32(n+3) {
				t.Fatalf("%d dials after listen %d and a pause of %v", got, n, pause)
			}
		}
		w.expect(t)
	})
}

// A chat server that accepts the connection and never sends a hello.
func TestNoHello(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := pipeServer(t)
		f := newFleet(t, c)
		d := f.connect(devices.TransportMQTT, devicetest.NewScript())
		f.hello(d)
		p := c.next(t)
		time.Sleep(HelloTimeout - 3*time.Second) // of the test's own clock
		p.send(`{"type":"stt","text":"busy"}`)   // not a hello
		time.Sleep(3*time.Second - time.Millisecond)
		synctest.Wait()
		d.expect(t, d.message(`"type":"stt","text":"busy"`))
		time.Sleep(2 * time.Millisecond)
		synctest.Wait()
		d.expect(t, d.message(`"type":"stt","text":"busy"`), d.goodbye())
		if f.bridge.Connections.Get(HelloMissing) != 1 || f.bridge.Connections.Get(Closed) != 0 {
			t.Error("it is not counted as a hello timeout")
		}
	})
}

// A conversation that ends while it waits for the chat server leaves no goroutine running, in
// every stage of the connection.
func TestEndWhileDialling(t *testing.T) {
	for _, stage := range []string{"TCP", "HTTP", "hello"} {
		synctest.Test(t, func(t *testing.T) {
			c := pipeServer(t)
			dial := c.dial
			switch stage {
			case "TCP":
				c.dial = func(ctx context.Context, _, _ string) (net.Conn, error) { <-ctx.Done(); return nil, ctx.Err() }
			case "HTTP":
				c.dial = func(context.Context, string, string) (net.Conn, error) {
					ours, theirs := net.Pipe()
					go func() { _, _ = theirs.Read(make([]byte, 4096)) }()
					return ours, nil
				}
			default:
				c.dial = dial
			}
			f := newFleet(t, c)
			d := f.connect(devices.TransportMQTT, devicetest.NewScript())
			f.hello(d)
			synctest.Wait()
			conversation := f.bridge.session(d.c)
			d.session.CloseAudio()
			time.Sleep(2 * closeLinger)
			synctest.Wait()
			conversation.mu.Lock()
			if conversation.running || conversation.writing {
				t.Errorf("%s: the goroutines outlive the conversation", stage)
			}
			conversation.mu.Unlock()
			if f.bridge.Connections.Get(Ended) != 1 {
				t.Errorf("%s: it is not counted as ended", stage)
			}
		})
	}
}

// A chat server that does not answer pings is detected; one that only answers pings is kept.
func TestDeadServerIsDetected(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := pipeServer(t)
		f := newFleet(t, c)
		d, p := f.conversation(c, devices.TransportMQTT)
		_ = p.ws.SetReadDeadline(time.Time{})
		reading := make(chan error, 1)
		go func() { // answers pings
			var err error
			for err == nil {
				_, _, err = p.ws.NextReader()
			}
			reading <- err
		}()
		time.Sleep(100 * time.Second) // of the test's own clock
		if d.isClosed() {
			t.Fatal("a quiet chat server was disconnected")
		}
		d.sendAudio(1) // a conversation without activity ends by itself
		synctest.Wait()
		_ = p.ws.SetReadDeadline(time.Now())
		<-reading
		time.Sleep(DeadAfter + 2*WriteTimeout)
		synctest.Wait()
		if got := d.received(); !d.isClosed() || len(got) != 1 || got[0] != d.goodbye() {
			t.Errorf("a dead chat server was not disconnected: %q", got)
		}
	})
}

// Over WebSocket the conversation continues after its chat server has disconnected: the
// speech is ended, and the next wake word dials again, with the frames before it.
func TestRedialOverWebSocket(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := pipeServer(t)
		f := newFleet(t, c)
		d, p := f.conversation(c, devices.TransportWebSocket)
		p.send(chatStart)
		p.play(devicetest.Packet(0))
		synctest.Wait()
		_ = p.ws.NetConn().Close()
		time.Sleep(5 * time.Second) // of the test's own clock
		want := []string{d.message(`"type":"tts","state":"start"`), string(devicetest.Packet(0)), d.message(`"type":"tts","state":"stop"`)}
		d.expect(t, want...)
		for n := range 100 {
			d.sendAudio(n)
		}
		f.send(d, `{"session_id":"","type":"listen","state":"stop"}`)
		f.send(d, `{"session_id":"","type":"abort"}`)
		synctest.Wait()
		if n := f.bridge.Connections.Get(Dialled); n != 1 {
			t.Fatalf("%d dials without a listen", n)
		}
		f.send(d, `{"session_id":"","type":"listen","state":"detect","text":"hi"}`)
		f.send(d, listenStart)
		d.sendAudio(100)
		p = c.open(t)
		for n := 100 - KeptFrames; n < 100; n++ {
			if f := p.frame(); !bytes.Equal(f.Opus, devicetest.Packet(n)) {
				t.Fatalf("packet %d is %q", n, f.Opus)
			}
		}
		for _, want := range []string{`{"session_id":"theirs","type":"listen","state":"detect","text":"hi"}`, chatListen} {
			if got := p.text(); got != want {
				t.Errorf("message %s, want %s", got, want)
			}
		}
		if f := p.frame(); !bytes.Equal(f.Opus, devicetest.Packet(100)) {
			t.Errorf("%q", f.Opus)
		}
		// 60 frames, listen stop and abort were dropped.
		if n := f.bridge.Dropped.Get(DropNoUpstream); n != 62 {
			t.Errorf("%d messages were dropped, want 62", n)
		}
		stop := fmt.Sprintf(`{"type":"tts","state":"stop","session_id":"%s"}`, d.c.ID()) // sent by the core, as response to abort
		d.expect(t, append(want, stop)...)
	})
}

// A chat server that does not read fills the queue and is disconnected; the other direction
// of the conversation continues until then.
func TestStuckServer(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		c := pipeServer(t)
		f := newFleet(t, c)
		d, p := f.conversation(c, devices.TransportMQTT)
		for n := range 2 * MaxQueuedFrames { // a pipe has no buffer: the first write blocks
			d.sendAudio(n)
		}
		p.send(`{"type":"stt","text":"hi"}`)
		synctest.Wait()
		d.expect(t, d.message(`"type":"stt","text":"hi"`))
		if n := f.bridge.Dropped.Get(DropFull); n < MaxQueuedFrames-1 || n > MaxQueuedFrames {
			t.Errorf("%d packets were refused", n)
		}
		time.Sleep(WriteTimeout + closeLinger + time.Second) // of the test's own clock
		synctest.Wait()
		d.expect(t, d.message(`"type":"stt","text":"hi"`), d.goodbye())
	})
}

// Close sends Close frames and leaves no goroutine; later conversations are ignored.
func TestClose(t *testing.T) {
	c := server(t)
	f := newFleet(t, c)
	d, p := f.conversation(c, devices.TransportMQTT)
	f.bridge.Close()
	d.expect(t, d.goodbye())
	p.ended()
	f.hello(d)
	d.sendAudio(1)
	f.send(d, listenStart)
	f.bridge.Close()
	select {
	case <-c.peers:
		t.Error("a closed bridge dials")
	default:
	}
	if d.received()[0] == d.goodbye() || len(d.received()) != 1 {
		t.Errorf("%q", d.received())
	}
}

// Without a valid TLS certificate nothing is sent.
func TestUntrustedServer(t *testing.T) {
	c := server(t)
	c.url = strings.Replace(c.url, "ws://", "wss://", 1)
	f := newFleet(t, c)
	d := f.connect(devices.TransportMQTT, devicetest.NewScript())
	f.hello(d)
	d.expect(t, d.goodbye())
	if f.bridge.Connections.Get(DialFailed) != 1 {
		t.Error("it was dialled")
	}
}

// A device that loses its MQTT connection keeps its chat server; messages for the device are
// counted as dropped meanwhile.
func TestDeviceAway(t *testing.T) {
	c := server(t)
	f := newFleet(t, c)
	d, p := f.conversation(c, devices.TransportMQTT)
	d.session.Close(devices.CloseGone)
	p.send(`{"type":"stt","text":"lost"}`)
	devicetest.Eventually(t, "it is counted", func() bool { return f.bridge.Dropped.Get(DropDevice) == 1 })
	again := f.connect(devices.TransportMQTT, devicetest.NewScript())
	p.send(`{"type":"stt","text":"again"}`)
	again.expect(t, d.message(`"type":"stt","text":"again"`))
	d.sendAudio(5)
	if f := p.frame(); !bytes.Equal(f.Opus, devicetest.Packet(5)) {
		t.Errorf("%q", f.Opus)
	}
}
