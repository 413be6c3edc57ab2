package main

import (
	"context"
	"crypto/aes"
	"crypto/cipher"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"net"
	"net/netip"
	"testing"
	"time"

	"fleetd/simulator/firmware"
)

func TestReplyOf(t *testing.T) {
	const (
		webSocket = `{"websocket":{"url":"ws://x/","token":"secret","version":1}}`
		mqtt      = `{"mqtt":{"endpoint":"127.0.0.1:1883","client_id":"a","username":"client:b","password":"secret","publish_topic":"fleetd/a/up","keepalive":120}}`
	)
	for _, tc := range []struct {
		transport, reply string
		want             firmware.Login
		bad              bool
	}{
		{transport: overWebSocket, reply: webSocket, want: firmware.Login{URL: "ws://x/", Token: "secret", Version: 1}},
		{transport: overMQTT, reply: mqtt, want: firmware.Login{Endpoint: "127.0.0.1:1883", ClientID: "a", Username: "client:b", Password: "secret", PublishTopic: "fleetd/a/up", Keepalive: 120}},
		{transport: overWebSocket, reply: mqtt, bad: true},
		{transport: overMQTT, reply: webSocket, bad: true},
		{transport: overMQTT, reply: `{"mqtt":{"password":"secret","publish_topic":"t"}}`, bad: true},
		{transport: overMQTT, reply: `{`, bad: true},
	} {
		reply, err := replyOf(tc.transport, []byte(tc.reply), 7)
		tc.want.Device, tc.want.Client = "02:00:00:00:00:07", clientID(7)
		if (err != nil) != tc.bad || !tc.bad && reply.Login != tc.want {
			t.Errorf("%s %s: %+v, %v", tc.transport, tc.reply, reply.Login, err)
		}
	}
}

const channelKey = "000102030405060708090a0b0c0d0e0f"

func openChannel(t *testing.T, server netip.AddrPort, ssrc int) *firmware.Audio {
	t.Helper()
	hello := fmt.Sprintf(`{"type":"hello","transport":"udp","udp":{"server":"%s","port":%d,"key":"%s","nonce":"01000000%08x0000000000000000"}}`,
		server.Addr(), server.Port(), channelKey, ssrc)
	c, err := firmware.ReadAudio([]byte(hello))
	if err != nil {
		t.Fatal(err)
	}
	return c
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
		var channels []*firmware.Audio
		for i := range devices {
			channels = append(channels, openChannel(t, sink.LocalAddr().(*net.UDPAddr).AddrPort(), i+1))
		}
		s, err := newSpeaker(channels)
		if err != nil {
			t.Fatal(err)
		}
		seen, from := map[uint32]uint32{}, map[uint32]netip.AddrPort{}
		for received := 0; received < 200 || len(seen) < devices; {
			sent, err := s.speak(t.Context(), 2000, 20*time.Millisecond)
			if err != nil || sent > 40 {
				t.Fatalf("%d packets sent in 20 ms, %v", sent, err)
			}
			for range sent {
				hearOne(t, sink, seen, from)
			}
			received += sent
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
		t.Fatalf("device %d sent % x", ssrc, b[audioHeader:n])
	}
}

func TestSpeakerEnds(t *testing.T) {
	ctx, cancel := context.WithCancel(t.Context())
	s, err := newSpeaker([]*firmware.Audio{openChannel(t, netip.MustParseAddrPort("127.0.0.1:9"), 1)})
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
