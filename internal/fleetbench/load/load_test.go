package load

import (
	"bufio"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"slices"
	"strings"
	"testing"
	"time"
)

// Both sides of the lists have the same shape as the firmware's pages.
func TestToolPages(t *testing.T) {
	for _, callable := range []bool{false, true} {
		pages, err := ToolPages(7, callable)
		if err != nil || len(pages) != 3 {
			t.Fatalf("%d pages, %v", len(pages), err)
		}
		var names []string
		cursor := ""
		for i, text := range pages {
			var page struct {
				Tools      []tool
				NextCursor string
			}
			if err := json.Unmarshal([]byte(text), &page); err != nil || len(text) > 8000 {
				t.Fatalf("page %d of %d bytes: %v", i, len(text), err)
			}
			if cursor != "" && page.Tools[0].Name != cursor {
				t.Errorf("page %d begins with %s, not %s", i, page.Tools[0].Name, cursor)
			}
			for _, tool := range page.Tools {
				names = append(names, tool.Name)
			}
			cursor = page.NextCursor
		}
		if len(names) != listLength || cursor != "" || slices.Contains(names, ToolSetVolume) != callable {
			t.Errorf("callable %v: %d tools, last cursor %q, %q", callable, len(names), cursor, names[:2])
		}
	}
}

func TestReadResponse(t *testing.T) {
	good := bufio.NewReader(strings.NewReader("HTTP/1.1 429 Too Many Requests\r\nContent-Length: 5\r\nX: y\r\n\r\nhelloHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nhi"))
	for _, want := range []struct {
		status int
		body   string
	}{{429, "hello"}, {200, "hi"}} {
		if status, body, err := ReadResponse(good); err != nil || status != want.status || string(body) != want.body {
			t.Errorf("%d %q, %v, want %+v", status, body, err, want)
		}
	}
	for _, bad := range []string{"", "HTTP/1.1 abc\r\n\r\n", "HTTP/1.1 200 OK\r\n\r\n", "HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nshort", "HTTP/1.1 200 OK\r\nContent-Length: x\r\n\r\n"} {
		if _, _, err := ReadResponse(bufio.NewReader(strings.NewReader(bad))); err == nil {
			t.Errorf("%q is accepted", bad)
		}
	}
}

// Frames of every length form come through, and larger buffers are made when needed.
func TestFrames(t *testing.T) {
	for _, n := range []int{0, 1, 125, 126, 127, 300, 65535} {
		payload := strings.Repeat("x", n)
		client := AppendFrame(nil, OpText, []byte(payload))
		header := 2
		if n >= 126 {
			header = 4
		}
		if client[1]&0x80 == 0 {
			t.Fatalf("%d bytes: a client's frame must be masked", n)
		}
		server := append(slices.Clone(client[:header]), client[header+4:]...) // without the mask, as a server sends it
		server[1] &^= 0x80
		op, got, err := ReadFrame(bufio.NewReader(strings.NewReader(string(server))), make([]byte, 16))
		if err != nil || op != OpText || string(got) != payload {
			t.Errorf("%d bytes: opcode %d, %d bytes, %v", n, op, len(got), err)
		}
	}
	if _, _, err := ReadFrame(bufio.NewReader(strings.NewReader("\x81\x7f\x00\x00\x00\x00\x00\x01\x00\x00")), nil); err == nil {
		t.Error("a frame over 64 KiB is accepted")
	}
}

// A device answers calls and pings on a real connection.
func TestAnswerCalls(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = listener.Close() }()
	c, err := Dial(t.Context(), listener.Addr().String(), 3001)
	if err != nil {
		t.Fatal(err)
	}
	server, err := listener.Accept()
	if err != nil {
		t.Fatal(err)
	}
	if host, _, _ := net.SplitHostPort(server.RemoteAddr().String()); host != "127.0.0.4" {
		t.Errorf("device 3001 dials from %s", host)
	}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		AnswerCalls(c, Framing{})
	}()
	const request = `{"session_id":"abc","type":"mcp","payload":{"jsonrpc":"2.0","method":"tools/call","params":{"name":"x","arguments":{"id":9}},"id":41}}`
	frames := append([]byte{0x89, 2, 'h', 'i', 0x81, 15}, `{"type":"noop"}`...)
	frames = append(append(frames, 0x81, 126, 0, byte(len(request))), request...)
	if _, err := server.Write(frames); err != nil {
		t.Fatal(err)
	}
	br := bufio.NewReader(server)
	if op, payload := readMasked(t, br); op != OpPong || payload != "hi" {
		t.Errorf("a ping is answered with opcode %d, %q", op, payload)
	}
	want := `{"session_id":"abc","type":"mcp","payload":{"jsonrpc":"2.0","id":41,"result":{"content":[{"type":"text","text":"true"}],"isError":false}}}`
	if op, payload := readMasked(t, br); op != OpText || payload != want {
		t.Errorf("opcode %d, %s", op, payload)
	}
	if err := server.Close(); err != nil {
		t.Fatal(err)
	}
	<-ended
}

// readMasked reads a client's frame below 64 KiB that is masked with zeros.
func readMasked(t *testing.T, br *bufio.Reader) (op byte, payload string) {
	t.Helper()
	head := make([]byte, 2)
	if _, err := io.ReadFull(br, head); err != nil {
		t.Fatal(err)
	}
	n := int(head[1] & 127)
	if n == 126 {
		long := make([]byte, 2)
		if _, err := io.ReadFull(br, long); err != nil {
			t.Fatal(err)
		}
		n = int(long[0])<<8 | int(long[1])
	}
	body := make([]byte, 4+n)
	if _, err := io.ReadFull(br, body); err != nil {
		t.Fatal(err)
	}
	return head[0] & 15, string(body[4:])
}

func TestInParallel(t *testing.T) {
	done := make([]bool, 100)
	err := InParallel(7, len(done), func() (func(int) error, func(), error) {
		return func(i int) error { done[i] = true; return nil }, func() {}, nil
	})
	if err != nil || slices.Contains(done, false) {
		t.Errorf("%v, %v", done, err)
	}
	broken := errors.New("broken")
	err = InParallel(7, 100, func() (func(int) error, func(), error) {
		return func(int) error { return broken }, func() {}, nil
	})
	if !errors.Is(err, broken) {
		t.Errorf("error %v", err)
	}
}

// The run's end reaches callers that have nobody to call.
func TestCallLoadEnds(t *testing.T) {
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = listener.Close() }()
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := CallLoad(ctx, Target{Address: listener.Addr().String()}, 2, 2, time.Minute); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
}

// Messages of every length form come through a PUBLISH, and packets of other kinds are passed over.
func TestPublish(t *testing.T) {
	wire := Framing{"fleetd/020000000001/up"}
	for _, n := range []int{0, 1, 103, 104, 300, 16_359, 16_360, 60_000} {
		want := strings.Repeat("x", n)
		stream := append([]byte{0xd0, 0}, wire.Append(nil, []byte(want))...) // a PINGRESP before it
		br := bufio.NewReader(strings.NewReader(string(stream)))
		if op, _, err := wire.Read(br, nil); err != nil || op != 0 {
			t.Fatalf("PINGRESP: %d, %v", op, err)
		}
		if op, got, err := wire.Read(br, make([]byte, 16)); err != nil || op != OpText || string(got) != want {
			t.Errorf("%d bytes: %d, %d bytes, %v", n, op, len(got), err)
		}
	}
	for _, bad := range []string{"", "\x30", "\x30\x05\x00\x01a", "\x30\x01\x00", "\x30\x02\x00\x01", "\x30\x81\x80\x04"} {
		if op, m, err := wire.Read(bufio.NewReader(strings.NewReader(bad)), nil); err == nil {
			t.Errorf("%q is read as %d, %q", bad, op, m)
		}
	}
}
