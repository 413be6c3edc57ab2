package main

import (
	"bufio"
	"context"
	"crypto/aes"
	"crypto/cipher"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"testing"
	"time"
)

func TestLogin(t *testing.T) {
	const (
		webSocket = `{"websocket":{"url":"ws://x/","token":"secret","version":1}}`
		mqtt      = `{"mqtt":{"endpoint":"127.0.0.1:1883","client_id":"a","username":"client:b","password":"secret","publish_topic":"fleetd/a/up","keepalive":120}}`
	)
	for _, tc := range []struct {
		transport, reply string
		want             login
		bad              bool
	}{
		{transport: overWebSocket, reply: webSocket, want: login{password: "secret"}},
		{transport: overMQTT, reply: mqtt, want: login{"127.0.0.1:1883", "secret", "fleetd/a/up", 120}},
		{transport: overWebSocket, reply: mqtt, bad: true},
		{transport: overMQTT, reply: webSocket, bad: true},
		{transport: overMQTT, reply: `{"mqtt":{"password":"secret","publish_topic":"t"}}`, bad: true},
		{transport: overMQTT, reply: `{`, bad: true},
	} {
		var got login
		if err := got.read(tc.transport, []byte(tc.reply)); (err != nil) != tc.bad || !tc.bad && got != tc.want {
			t.Errorf("%s %s: %+v, %v", tc.transport, tc.reply, got, err)
		}
	}
}

// CONNECT is what the OTA reply asks for, and a refusal is an error.
func TestConnectMQTT(t *testing.T) {
	const want = "\x10\x49\x00\x04MQTT\x04\xc2\x00\x78\x00\x0c020000000103\x00\x2bclient:36c98363-3656-43cb-a00f-000000000103\x00\x02pw"
	for answer, accepted := range map[string]bool{"\x20\x02\x00\x00": true, "\x20\x02\x00\x05": false, "\xd0\x00": false, "": false} {
		device, server := net.Pipe()
		result := make(chan error, 1)
		go func() {
			w := dancer{br: bufio.NewReader(device), buf: make([]byte, 64)}
			result <- w.connectMQTT(device, login{password: "pw", keep: 120}, 0x103)
		}()
		got := make([]byte, len(want))
		if _, err := io.ReadFull(server, got); err != nil || string(got) != want {
			t.Fatalf("CONNECT %q, %v\nwant    %q", got, err, want)
		}
		if _, err := io.WriteString(server, answer); err != nil {
			t.Fatal(err)
		}
		if err := server.Close(); err != nil {
			t.Fatal(err)
		}
		if err := <-result; (err == nil) != accepted {
			t.Errorf("after %q: %v", answer, err)
		}
	}
}

const channelKey = "000102030405060708090a0b0c0d0e0f"

func openChannel(t *testing.T, server netip.AddrPort, ssrc int) channel {
	t.Helper()
	var c channel
	hello := fmt.Sprintf(`{"type":"hello","transport":"udp","udp":{"server":"%s","port":%d,"key":"%s","nonce":"01000000%08x0000000000000000"}}`,
		server.Addr(), server.Port(), channelKey, ssrc)
	if err := c.open([]byte(hello)); err != nil {
		t.Fatal(err)
	}
	return c
}

func TestChannelRefusesNonsense(t *testing.T) {
	for _, udp := range []string{"{}", `{"server":"127.0.0.1","port":1,"key":"00","nonce":"00"}`, `{"server":"x","port":1,"key":"` + channelKey + `","nonce":"` + channelKey + `"}`,
		`{"server":"127.0.0.1","port":1,"key":"` + channelKey + `","nonce":"0100"}`} {
		if err := new(channel).open([]byte(`{"type":"hello","udp":` + udp + `}`)); err == nil {
			t.Errorf("%s is accepted", udp)
		}
	}
}

// Every device speaks from one address, packets are numbered from 1, and decrypt to the Opus packet by another
// implementation of CTR.
func TestSpeaker(t *testing.T) {
	sink, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = sink.Close() }()
	if err := errors.Join(sink.SetReadBuffer(4<<20), sink.SetReadDeadline(time.Now().Add(10*time.Second))); err != nil {
		t.Fatal(err)
	}
	for _, devices := range []int{3, 20} {
		var channels []channel
		for i := range devices {
			channels = append(channels, openChannel(t, sink.LocalAddr().(*net.UDPAddr).AddrPort(), i+1))
		}
		s, err := newSpeaker(channels)
		if err != nil {
			t.Fatal(err)
		}
		seen, from := map[uint32]uint32{}, map[uint32]netip.AddrPort{}
		for heard := 0; heard < 200 || len(seen) < devices; {
			sent, err := s.speak(t.Context(), 2000, 20*time.Millisecond)
			if err != nil || sent > 40 {
				t.Fatalf("%d packets sent in 20 ms, %v", sent, err)
			}
			for range sent {
				hearOne(t, sink, seen, from)
			}
			heard += sent
		}
		if err := s.close(); err != nil {
			t.Error(err)
		}
		if len(seen) != devices {
			t.Errorf("%d devices spoke of %d", len(seen), devices)
		}
	}
}

// hearOne checks one packet, against the packets of each device so far and the address it came from.
func hearOne(t *testing.T, sink *net.UDPConn, seen map[uint32]uint32, from map[uint32]netip.AddrPort) {
	t.Helper()
	b := make([]byte, 2048)
	n, addr, err := sink.ReadFromUDPAddrPort(b)
	if err != nil {
		t.Fatal(err)
	}
	ssrc, seq := binary.BigEndian.Uint32(b[4:]), binary.BigEndian.Uint32(b[12:])
	if old, known := from[ssrc]; known && old != addr {
		t.Fatalf("device %d speaks from %v and %v", ssrc, old, addr)
	}
	seen[ssrc]++
	from[ssrc] = addr
	if n != audioHeader+audioPayload || int(binary.BigEndian.Uint16(b[2:])) != audioPayload || seq != seen[ssrc] {
		t.Fatalf("%d bytes from device %d, sequence %d instead of %d: % x", n, ssrc, seq, seen[ssrc], b[:audioHeader])
	}
	key, err := hex.DecodeString(channelKey)
	if err != nil {
		t.Fatal(err)
	}
	block, err := aes.NewCipher(key)
	if err != nil {
		t.Fatal(err)
	}
	cipher.NewCTR(block, b[:audioHeader]).XORKeyStream(b[audioHeader:n], b[audioHeader:n])
	if string(b[audioHeader:n]) != string(speech[:]) {
		t.Fatalf("device %d said % x", ssrc, b[audioHeader:n])
	}
}

func TestSpeakerEnds(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	s, err := newSpeaker([]channel{openChannel(t, netip.MustParseAddrPort("127.0.0.1:9"), 1)})
	if err != nil {
		t.Fatal(err)
	}
	cancel()
	if _, err := s.speak(ctx, 10, time.Minute); !errors.Is(err, context.Canceled) {
		t.Errorf("error %v", err)
	}
	if err := s.close(); err != nil {
		t.Fatal(err)
	}
}
