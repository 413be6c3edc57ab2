package main

import (
	"bytes"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"fleetd/simulator/firmware"
)

func TestAttackUDP(t *testing.T) {
	peer, err := net.ListenUDP("udp4", &net.UDPAddr{IP: net.IPv4(127, 0, 0, 1)})
	if err != nil {
		t.Fatal(err)
	}
	defer func() { _ = peer.Close() }()
	type count struct {
		packets, largest, other int
		from                    map[int]bool
	}
	done := make(chan count)
	go func() {
		c := count{from: map[int]bool{}}
		buf := make([]byte, 1500)
		for {
			n, from, err := peer.ReadFromUDP(buf)
			if err != nil {
				done <- c
				return
			}
			if c.packets == 0 {
				_, _ = peer.WriteToUDP([]byte("an answer"), from)
			}
			c.packets++
			c.from[from.Port] = true
			p := buf[:n]
			if p[0] != 1 || !bytes.Equal(p[4:8], []byte{0xc0, 0xff, 0xee, 0x01}) || int(p[2])<<8|int(p[3]) != n-firmware.AudioHeader {
				c.other++
			}
			if bytes.Equal(p[12:16], []byte{255, 255, 255, 255}) {
				c.largest++
			}
		}
	}()
	var out bytes.Buffer
	err = run(t.Context(), []string{"--attack", "udp", "--target", peer.LocalAddr().String(), "--ssrc", "c0ffee01", "--rate", "2000",
		"--duration", "300ms", "--attack-ports", "3", "--report", "json"}, &out, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	_ = peer.SetReadDeadline(time.Now().Add(100 * time.Millisecond))
	c := <-done
	var r udpAttack
	if err := json.Unmarshal(out.Bytes(), &r); err != nil {
		t.Fatal(err)
	}
	if c.packets < 100 || c.other != 0 || c.largest < c.packets/5 || len(c.from) != 3 {
		t.Errorf("peer saw %+v", c)
	}
	if r.Sent < uint64(c.packets) || r.PacketsBack != 1 || r.BytesBack != 9 {
		t.Errorf("report %+v", r)
	}
}

// fakeBroker answers every CONNECT, with code 4 and the end if it refuses, and ends what begins otherwise.
func fakeBroker(t *testing.T, refuses *atomic.Bool) (address string) {
	t.Helper()
	l, err := net.Listen("tcp4", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = l.Close() })
	serve := func(c net.Conn) {
		_ = c.SetDeadline(time.Now().Add(20 * time.Second))
		_ = firmware.ReadPackets(c, func(p firmware.Packet) bool {
			switch {
			case p.Type != firmware.PacketConnect:
				_ = c.Close()
			case refuses.Load():
				_, _ = c.Write([]byte{firmware.PacketConnack << 4, 2, 0, 4})
				_ = c.Close()
			default:
				_, _ = c.Write([]byte{firmware.PacketConnack << 4, 2, 0, 0})
			}
			return false
		})
	}
	go func() {
		for {
			c, err := l.Accept()
			if err != nil {
				return
			}
			t.Cleanup(func() { _ = c.Close() })
			go serve(c)
		}
	}()
	return l.Addr().String()
}

func TestAttackMQTT(t *testing.T) {
	t.Parallel()
	var refuses atomic.Bool
	broker := fakeBroker(t, &refuses)
	ota := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		_, _ = fmt.Fprintf(w, `{"mqtt":{"endpoint":%q,"client_id":"02f1ee000000","username":"client:u","password":"pw","publish_topic":"fleetd/02f1ee000000/up"}}`, broker)
	}))
	defer ota.Close()
	var out bytes.Buffer
	err := run(t.Context(), []string{"--attack", "mqtt", "--ota", ota.URL + "/xiaozhi/ota/", "--duration", "1s", "--report", "json"}, &out, io.Discard)
	if err != nil {
		t.Fatal(err)
	}
	var r mqttAttack
	if err := json.Unmarshal(out.Bytes(), &r); err != nil {
		t.Fatal(err)
	}
	got := map[string]probeResult{}
	for _, p := range r.Probes {
		got[p.Name] = p
	}
	if len(got) != len(probes()) || !r.Login {
		t.Fatalf("report %+v", r)
	}
	// The fake accepts every CONNECT and closes connections that begin with another packet.
	if p := got["publish-before-connect"]; !p.Closed || p.CONNACK != nil || p.AfterMS > 900 {
		t.Errorf("publish before CONNECT: %+v", p)
	}
	if p := got["never-connect"]; p.Closed || p.AfterMS < 900 || p.Error != "" {
		t.Errorf("never CONNECT: %+v", p)
	}
	if p := got["wildcard-topic"]; p.CONNACK == nil || *p.CONNACK != 0 || p.Closed {
		t.Errorf("wildcard topic: %+v", p)
	}
	var text bytes.Buffer
	refuses.Store(true)
	if err := run(t.Context(), []string{"--attack", "mqtt", "--target", broker, "--ota", "http://127.0.0.1:1/", "--duration", "500ms"}, &text, io.Discard); err != nil {
		t.Fatal(err)
	}
	if !strings.Contains(text.String(), "CONNACK 4") || !strings.Contains(text.String(), "credentials from the OTA answer: false") {
		t.Errorf("text report\n%s", text.String())
	}
}

func TestAttackFlags(t *testing.T) {
	for _, tt := range []struct {
		args string
		want string
	}{
		{"--attack tcp", "tcp"},
		{"--attack udp --ssrc 00000001", "--target"},
		{"--attack udp --target h:1 --ssrc 123", "--ssrc"},
		{"--attack udp --target h:1 --ssrc 00000001 --rate 0", "--rate"},
	} {
		if _, err := parseFlags(strings.Fields(tt.args), io.Discard); !errors.Is(err, errUsage) || !strings.Contains(err.Error(), tt.want) {
			t.Errorf("%s: %v", tt.args, err)
		}
	}
}
