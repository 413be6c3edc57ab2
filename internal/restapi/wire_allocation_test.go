//go:build !race

// The race detector allocates, so this budget is held without it.

package restapi

import (
	"bufio"
	"bytes"
	"encoding/binary"
	"fmt"
	"io"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"slices"
	"testing"

	"fleetd/internal/credential"
	"fleetd/internal/devices"
	"fleetd/internal/devicetest"
	"fleetd/internal/wsdevice"
)

// TestWholeCallAllocations holds everything that a local call costs to a budget: from the bytes of an HTTP request to a
// device's WebSocket and back, less what is net/http's. That is what the same request on the same connection takes when
// net/http routes it by the same pattern to a handler that reads it and answers at once; a handler that leaves even that
// out is shown beside it. Both ends of the wire are in this process, and allocate nothing.
func TestWholeCallAllocations(t *testing.T) {
	f := newFleet(t)
	mint, err := credential.New([]byte("0123456789abcdef"))
	if err != nil {
		t.Fatal(err)
	}
	front := wsdevice.New(wsdevice.Options{Service: f.service, Mint: mint, Log: slog.New(slog.DiscardHandler)})
	constant := http.NewServeMux()
	constant.HandleFunc("POST /constant/{device}/tools/{tool}/call", func(w http.ResponseWriter, r *http.Request) {
		x := exchanges.Get().(*exchange)
		defer x.free()
		if err := x.read(r); err != nil || r.PathValue("device") == "" {
			t.Error(err)
		}
		w.Header()["Content-Type"] = valueJSON
		_, _ = w.Write(constantAnswer) // the caller reads it, or the test fails
	})
	server := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		switch r.URL.Path {
		case "/empty":
		case "/device":
			front.ServeHTTP(w, r)
		case constantPath:
			constant.ServeHTTP(w, r)
		default:
			f.api.ServeHTTP(w, r)
		}
	}))
	f.ports.Put(devices.Member{ID: robot, ClientID: "client-1"})
	address := server.Listener.Addr().String()
	ended := make(chan struct{})
	device := dialWire(t, address)
	t.Cleanup(func() {
		_ = device.Close() // the node may have
		<-ended
		server.Close()
		f.service.Close()
		front.Close()
	})
	br := bufio.NewReader(device)
	upgrade := fmt.Sprintf("GET /device HTTP/1.1\r\nHost: x\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ==\r\n"+
		"Sec-WebSocket-Version: 13\r\nDevice-Id: %s\r\nClient-Id: client-1\r\nAuthorization: Bearer %s\r\n\r\n", robot, mint.DeviceToken(string(robot), "client-1", 0))
	if _, err := io.WriteString(device, upgrade); err != nil {
		t.Fatal(err)
	}
	if answer, err := http.ReadResponse(br, nil); err != nil || answer.StatusCode != http.StatusSwitchingProtocols {
		t.Fatalf("upgrade: %+v, %v", answer, err)
	}
	go func() {
		defer close(ended)
		answerFrames(device, br)
	}()
	devicetest.Eventually(t, "tools are listed", func() bool {
		v, err := f.service.Get(t.Context(), robot)
		return err == nil && v.Presence.MCP == devices.MCPReady
	})

	caller := dialWire(t, address)
	defer func() { _ = caller.Close() }() // nothing is under way
	from := bufio.NewReader(caller)
	const body = `{"arguments":{"volume":50}}` // what the bench's callers send
	request := func(path string) []byte {
		return fmt.Appendf(nil, "POST %s HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer %s\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s",
			path, f.token, len(body), body)
	}
	exchange := func(request []byte) int {
		if _, err := caller.Write(request); err != nil {
			t.Fatal(err)
		}
		return discardResponse(t, from)
	}
	call, bare, empty := request(volumePath), request(constantPath), request("/empty")
	whole := typical(func() {
		if n := exchange(call); n == 0 {
			t.Fatal("an empty answer to a call")
		}
	})
	theirs := typical(func() { exchange(bare) })
	t.Logf("%.0f allocations, %.0f of them net/http's; %.0f without a handler", whole, theirs, typical(func() { exchange(empty) }))
	if ours := whole - theirs; ours > 17 { // two of them are the call's id and its header
		t.Errorf("%.0f allocations are ours, want at most 17", ours)
	}
}

// typical returns the median of many averages over short times. The rest of the process allocates meanwhile, a collection takes
// something out of the pools, and net/http takes one allocation less for a request that has arrived before it looks: each of
// these is in some of the times only.
func typical(f func()) float64 {
	var rounds []float64
	for range 41 {
		rounds = append(rounds, testing.AllocsPerRun(25, f))
	}
	slices.Sort(rounds)
	return rounds[len(rounds)/2]
}

const constantPath = "/constant/aa:bb:cc:dd:ee:ff/tools/self.audio_speaker.set_volume/call"

var constantAnswer = []byte(`{"content":[{"type":"text","text":"true"}],"isError":false,"duration_ms":0.25,"node":"n-test"}` + "\n")

func dialWire(t *testing.T, address string) net.Conn {
	t.Helper()
	c, err := net.Dial("tcp", address)
	if err != nil {
		t.Fatal(err)
	}
	return c
}

// discardResponse reads a successful answer and returns the length of its body.
func discardResponse(t *testing.T, br *bufio.Reader) (length int) {
	for first := true; ; first = false {
		line, err := br.ReadSlice('\n')
		if err != nil {
			t.Fatal(err)
		}
		if first && !bytes.HasPrefix(line, []byte("HTTP/1.1 200 ")) {
			t.Fatalf("answer %q", line)
		}
		if value, ok := bytes.CutPrefix(line, []byte("Content-Length: ")); ok {
			for _, digit := range bytes.TrimSpace(value) {
				length = length*10 + int(digit-'0')
			}
		}
		if len(line) == 2 {
			break
		}
	}
	if _, err := br.Discard(length); err != nil {
		t.Fatal(err)
	}
	return length
}

// answerFrames is a device: it sends a hello and answers every request until the connection ends, calls without allocating.
func answerFrames(c net.Conn, br *bufio.Reader) {
	script := devicetest.NewScript()
	buf, out := make([]byte, 4096), make([]byte, 0, 4096)
	out = appendMasked(out, `{"type":"hello","version":1,"features":{"mcp":true},"transport":"websocket","audio_params":{"format":"opus","sample_rate":16000,"channels":1,"frame_duration":60}}`)
	answer := make([]byte, 0, 4096)
	for {
		if _, err := c.Write(out); err != nil {
			return
		}
		out = out[:0]
		for len(out) == 0 {
			message, err := readText(br, buf)
			switch {
			case err != nil:
				return
			case bytes.Contains(message, []byte(`"tools/call"`)):
				_, rest, _ := bytes.Cut(message, []byte(`"session_id":"`))
				session, _, _ := bytes.Cut(rest, []byte(`"`))
				id := message[bytes.LastIndex(message, []byte(`"id":`))+len(`"id":`):]
				answer = append(append(answer[:0], `{"session_id":"`...), session...)
				answer = append(answer, `","type":"mcp","payload":{"jsonrpc":"2.0","id":`...)
				answer = append(answer, bytes.TrimRight(id, "}")...)
				answer = append(append(append(answer, ','), devicetest.True...), "}}"...)
				out = appendMasked(out, answer)
			default:
				out = appendMasked(out, script.Answer(message))
			}
		}
	}
}

// appendMasked appends a text frame of a client, masked with zeros, unless the text is empty.
func appendMasked[T string | []byte](dst []byte, text T) []byte {
	switch n := len(text); {
	case n == 0:
		return dst
	case n < 126:
		dst = append(dst, 0x81, 0x80|byte(n))
	default:
		dst = binary.BigEndian.AppendUint16(append(dst, 0x81, 0x80|126), uint16(n))
	}
	return append(append(dst, 0, 0, 0, 0), text...)
}

// readText reads a server's frame into buf.
func readText(br *bufio.Reader, buf []byte) ([]byte, error) {
	head, err := br.Peek(2)
	if err != nil {
		return nil, err
	}
	n, skip := int(head[1]), 2
	if n == 126 {
		if head, err = br.Peek(4); err != nil {
			return nil, err
		}
		n, skip = int(binary.BigEndian.Uint16(head[2:])), 4
	}
	if _, err := br.Discard(skip); err != nil {
		return nil, err
	}
	if n > len(buf) {
		return nil, fmt.Errorf("a frame of %d bytes", n)
	}
	_, err = io.ReadFull(br, buf[:n])
	return buf[:n], err
}
