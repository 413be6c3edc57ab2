package firmware

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"io"
	"net"
	"strings"
	"testing"
	"time"
)

func TestFaultsOfADevice(t *testing.T) {
	o, err := parseFlags([]string{"--fault", "slow:2,silent"}, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	if got := faultsOf(o.Faults, 1); got != faultSlow|faultSilent {
		t.Errorf("faults of device 1: %b", got)
	}
	if got := faultsOf(o.Faults, 2); got != faultSilent {
		t.Errorf("faults of device 2: %b", got)
	}
}

func TestSeedDecidesIdentities(t *testing.T) {
	ids := func(seed string) []string {
		o, err := parseFlags([]string{"--devices", "3", "--seed", seed, "--fault", "clone:1"}, io.Discard)
		if err != nil {
			t.Fatal(err)
		}
		f, err := New(o)
		if err != nil {
			t.Fatal(err)
		}
		defer f.Close()
		var out []string
		for _, d := range f.devices {
			out = append(out, d.id+" "+d.clientID+" "+d.serial)
		}
		return out
	}
	a, b, c := ids("1"), ids("1"), ids("2")
	if strings.Join(a, "\n") != strings.Join(b, "\n") || strings.Join(a, "\n") == strings.Join(c, "\n") {
		t.Errorf("seed 1: %v\nagain: %v\nseed 2: %v", a, b, c)
	}
	if len(a) != 4 || a[3][:17] != a[0][:17] || a[3] == a[0] {
		t.Errorf("clone of the first device: %q and %q", a[0], a[len(a)-1])
	}
	if !strings.HasPrefix(a[1], "02:f1:ee:00:00:01 ") {
		t.Errorf("second device %q", a[1])
	}
}

func TestSSIDWithQuoteBreaksTheBody(t *testing.T) {
	o, err := parseFlags([]string{"--devices", "16", "--profile", "robot"}, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	f, err := New(o)
	if err != nil {
		t.Fatal(err)
	}
	defer f.Close()
	broken := 0
	for _, d := range f.devices {
		if !json.Valid([]byte(d.systemInfo().json())) {
			broken++
		}
	}
	if broken != 2 {
		t.Errorf("%d of 16 robots send an invalid body, want 2", broken)
	}
}

func TestWSURL(t *testing.T) {
	for _, tt := range []struct {
		in   string
		want deviceURL
		err  error
	}{
		{"ws://h/p", deviceURL{"ws", "h", 80, "/p", false}, nil},
		{"wss://h", deviceURL{"wss", "h", 443, "/", true}, nil},
		{"https://h/p", deviceURL{"https", "h", 80, "/p", true}, nil},
		{"ws://h:8000/xiaozhi/v1/?a=b:c", deviceURL{"ws", "h", 8000, "/xiaozhi/v1/?a=b:c", false}, nil},
		{"ws://h:80x/p", deviceURL{"ws", "h", 80, "/p", false}, nil},
		{"ws://h/p?t=a:b", deviceURL{}, errStoi},
		{"ws://[::1]:8000/", deviceURL{}, errStoi},
		{"h:8000", deviceURL{}, errURL},
	} {
		got, err := parseWSURL(tt.in)
		if !errors.Is(err, tt.err) || (err == nil && got != tt.want) {
			t.Errorf("%s: %+v, %v", tt.in, got, err)
		}
	}
}

func TestNVS(t *testing.T) {
	var n nvs
	var doc jsonDoc
	store := func(text string) error {
		root, err := doc.parse([]byte(text))
		if err != nil {
			t.Fatal(err)
		}
		return n.store("websocket", root)
	}
	for _, s := range []string{`{"url":"a","token":"t","version":3,"on":true,"none":null}`, `{"url":"b"}`, `{"token":"","version":0,"a_key_longer_than_15":""}`} {
		if err := store(s); err != nil {
			t.Fatalf("%s: %v", s, err)
		}
	}
	if n.text("websocket", "url") != "b" || n.text("websocket", "token") != "" || n.number("websocket", "version") != 0 || len(n.entries) != 3 {
		t.Errorf("entries %+v", n.entries)
	}
	for _, s := range []string{`{"a_key_longer_than_15":"x"}`, `{"url":"` + strings.Repeat("x", 4000) + `"}`, `{"sixteen_letters_":1}`} {
		if err := store(s); !errors.Is(err, errNVS) {
			t.Errorf("%.40s: %v", s, err)
		}
	}
	if err := store(`{"url":"` + strings.Repeat("x", 3999) + `","fifteen_letters":1}`); err != nil {
		t.Errorf("at the limits: %v", err)
	}
}

func TestIDSet(t *testing.T) {
	var s idSet
	for _, id := range []int32{5, 1, 3, 2, 4, 10, -7, 2147483647, 6} {
		if !s.add(id) {
			t.Errorf("%d counts as seen", id)
		}
	}
	for _, id := range []int32{1, 6, 10, -7, 3, 2147483647} {
		if s.add(id) {
			t.Errorf("%d counts as new", id)
		}
	}
	want := []idRange{{-7, -7}, {1, 6}, {10, 10}, {2147483647, 2147483647}}
	if len(s.ranges) != len(want) {
		t.Fatalf("ranges %v, want %v", s.ranges, want)
	}
	for i := range want {
		if s.ranges[i] != want[i] {
			t.Errorf("ranges %v, want %v", s.ranges, want)
		}
	}
}

func TestCJSON(t *testing.T) {
	var d jsonDoc
	accept := map[string]string{
		`{"a":"x"}trailing`:                    "x",
		"\xef\xbb\xbf \x01{ \"A\" :\t\"x\" }":  "x",
		`{"a":"x","a":"y"}`:                    "x",
		`{"A":"x","a":"y"}`:                    "x",
		`{"a":"\u0041\n\/\ud83d\ude00"}`:       "A\n/😀",
		`{"a":"x\u0000y"}`:                     "x",
		`{"a":"x\uZZZZy"}`:                     "x",
		"{\"a\":\"raw\nnewline\xff\"}":         "raw\nnewline\xff",
		`{"b":[1,{"a":"no"}],"a":"yes","c":0}`: "yes",
		`{"\u0061":"key"}`:                     "key",
	}
	for in, want := range accept {
		root, err := d.parse([]byte(in))
		if got := root.get("a").string(); err != nil || got != want {
			t.Errorf("%q: a = %q, %v; want %q", in, got, err, want)
		}
	}
	for _, in := range []string{"", "{", `{"a"}`, `{"a":}`, `{a:1}`, `[1,]`, `{"a":"\x"}`, `{"a":"\udc00"}`, `{"a":"\ud800x"}`, `"`, `"\`, "-", "+1", ".5", `{"a":1.2.3}`} {
		if _, err := d.parse([]byte(in)); err == nil {
			t.Errorf("%q: accepted", in)
		}
	}
	for in, want := range map[string]int32{"1.9": 1, "-0.5": 0, "1e3": 1000, "2147483648": 2147483647, "-1e99": -2147483648, "01": 1, "1e": 1, "9e999": 2147483647} {
		root, err := d.parse([]byte(in))
		if got := root.int32(); err != nil || got != want {
			t.Errorf("%s = %d, %v; want %d", in, got, err, want)
		}
	}
	nested := func(n int) []byte { return []byte(strings.Repeat("[", n) + strings.Repeat("]", n)) }
	if _, err := d.parse(nested(maxDepth)); err != nil {
		t.Errorf("depth %d: %v", maxDepth, err)
	}
	if _, err := d.parse(nested(maxDepth + 1)); err == nil {
		t.Errorf("depth %d: accepted", maxDepth+1)
	}
}

func TestVersionsCompareLikeTheFirmware(t *testing.T) {
	for _, tt := range []struct {
		current, offered string
		newer            bool
		aborts           bool
	}{
		{"2.4.2", "2.4.3", true, false}, {"2.4.2", "2.4.2", false, false}, {"2.4.2", "2.4.2.1", true, false},
		{"2.4.2", "2.5.0-rc1", true, false}, {"2.4.2", "2.10", true, false}, {"2.4.2", "v2.5", false, true}, {"2.4.2", "2..1", false, true},
	} {
		newer, err := newerVersion(tt.current, tt.offered)
		if newer != tt.newer || errors.Is(err, errStoi) != tt.aborts {
			t.Errorf("%s against %s: %v, %v", tt.offered, tt.current, newer, err)
		}
	}
}

// collector receives what a connection delivers.
type collector struct {
	messages []string
	pings    int
	closes   int
}

func (c *collector) onMessage(binary bool, data []byte) {
	kind := "t:"
	if binary {
		kind = "b:"
	}
	c.messages = append(c.messages, kind+string(data))
}
func (c *collector) onPing()  { c.pings++ }
func (c *collector) onClose() { c.closes++ }

func TestWSClientAgainstPlainListener(t *testing.T) {
	ln, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = ln.Close() }()
	request := make(chan string, 1)
	after := make(chan []byte, 1)
	go func() {
		conn, err := ln.Accept()
		if err != nil {
			return
		}
		defer func() { _ = conn.Close() }()
		_ = conn.SetDeadline(time.Now().Add(10 * time.Second))
		buf := make([]byte, 4096)
		n, _ := conn.Read(buf)
		request <- string(buf[:n])
		// The answer, the first frames and an interleaved ping arrive in pieces that ignore all borders.
		long := strings.Repeat("L", 3000)
		stream := []byte("HTTP/1.1 101 Switching Protocols\r\nX: y\r\n\r\n" +
			"\x81\x02hi" + // in one segment with the answer
			"\x01\x02ab" + "\x89\x01p" + "\x82\x03xxx" + "\x80\x02cd" + // fragments; ping and an unexpected message inside
			"\x82\x7e\x0b\xb8" + long +
			"\x82\x7f\x00\x00\x00\x00\x00\x00\x00\x03abc" +
			"\x81\x83\x01\x02\x03\x04" + "i\x60k" + // a masked server frame
			"\x88\x02\x03\xe8")
		for len(stream) > 0 {
			k := min(7, len(stream))
			if _, err := conn.Write(stream[:k]); err != nil {
				return
			}
			stream = stream[k:]
		}
		rest, _ := io.ReadAll(io.LimitReader(conn, 7))
		after <- rest
	}()
	d, err := newDialer("", false)
	if err != nil {
		t.Fatal(err)
	}
	u, err := parseWSURL("ws://" + ln.Addr().String() + "/x")
	if err != nil {
		t.Fatal(err)
	}
	c, err := dialWS(context.Background(), d, 0, u, &Login{Client: "c", Device: "d", Version: 1}, 7)
	if err != nil {
		t.Fatal(err)
	}
	defer c.drop()
	if got := <-request; !strings.HasPrefix(got, "GET /x HTTP/1.1\r\nHost: 127.0.0.1\r\nClient-Id: c\r\nConnection: Upgrade\r\n") || strings.Contains(got, "Authorization") {
		t.Errorf("request %q", got)
	}
	var seen collector
	if err := c.read(&seen); !errors.Is(err, io.EOF) {
		t.Errorf("read ended with %v", err)
	}
	want := []string{"t:hi", "t:abcd", "b:" + strings.Repeat("L", 3000), "b:abc", "t:hbh"}
	if strings.Join(seen.messages, "|") != strings.Join(want, "|") || seen.pings != 1 || seen.closes != 1 {
		t.Errorf("messages %.120q, pings %d, closes %d", seen.messages, seen.pings, seen.closes)
	}
	pong := <-after
	if len(pong) != 7 || pong[0] != 0x8A || pong[1] != 0x81 || pong[6]^pong[2] != 'p' {
		t.Errorf("pong %x", pong)
	}
	room := getBuffer()
	*room = appendFrameRoom(*room)
	if err := c.write(opText, room); !errors.Is(err, errNotOpen) {
		t.Errorf("write after a close frame: %v", err)
	}
}

func TestHandshakeRefused(t *testing.T) {
	for _, answer := range []string{"HTTP/1.1 401 Unauthorized\r\n\r\n", "HTTP/1.0 101 Switching\r\n\r\n", "HTTP/1.1 101 no end"} {
		ln, err := net.Listen("tcp", "127.0.0.1:0")
		if err != nil {
			t.Fatal(err)
		}
		go func() {
			if conn, err := ln.Accept(); err == nil {
				_, _ = conn.Read(make([]byte, 1024))
				_, _ = io.WriteString(conn, answer)
				_ = conn.Close()
			}
		}()
		d, _ := newDialer("", false)
		u, _ := parseWSURL("ws://" + ln.Addr().String() + "/")
		if _, err := dialWS(context.Background(), d, 0, u, &Login{}, 1); !errors.Is(err, errHandshake) {
			t.Errorf("%q: %v", answer, err)
		}
		_ = ln.Close()
	}
}

func TestSealFrame(t *testing.T) {
	for _, n := range []int{0, 1, 125, 126, 300, maxOutgoing} {
		payload := bytes.Repeat([]byte("p"), n)
		sealed := sealFrame(append(appendFrameRoom(nil), payload...), opBinary, [4]byte{1, 2, 3, 4})
		r := frameReader{byteReader{src: bytes.NewReader(sealed), buf: make([]byte, idleBuffer)}}
		f, err := r.next()
		if err != nil || !f.fin || f.opcode != opBinary || !bytes.Equal(f.payload, payload) {
			t.Errorf("%d bytes: %v %+v", n, err, f.opcode)
		}
	}
}
