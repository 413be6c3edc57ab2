package main

import (
	"bytes"
	"crypto/aes"
	"crypto/cipher"
	"encoding/binary"
	"fmt"
	"io"
	"net/netip"
	"os"
	"regexp"
	"strconv"
	"strings"
	"testing"
)

// TestMain lets a load start this program as its server.
func TestMain(m *testing.M) {
	if len(os.Args) > 1 && os.Args[1] == serverCommand {
		main()
		return
	}
	os.Exit(m.Run())
}

// Every load works with its server, and prints figures above 0.
func TestPrograms(t *testing.T) {
	for _, tc := range []struct {
		arguments string
		figures   []string // what comes after them
	}{
		{"toolcall -http net -json append -callers 4 -devices 8 -d 100ms", []string{" calls/s", " us/call", " us |"}},
		{"wsidle -n 300 -mode tuned", []string{" B |", " B\n"}},
		{"wsidle -n 300 -mode tuned -tls", []string{" B |", " B\n"}},
		{"storm -n 40 -parse hash -store mem", []string{" devices/s", " ms", " us/device"}},
		{"mqttbench -idle 300 -broker mini", []string{" B |", " B\n"}},
		{"mqttbench -devices 8 -callers 4 -d 100ms", []string{" calls/s", " us/call"}},
		{"udpaudio -io std -crypt manual -forward -sessions 20 -size 90 -pps 2000 -d 200ms", []string{" pps", " ns/packet"}},
	} {
		t.Run(tc.arguments, func(t *testing.T) {
			t.Parallel()
			checkProgram(t, tc.arguments, tc.figures)
		})
	}
}

func TestStormOnPostgres(t *testing.T) {
	dsn := os.Getenv("FLEETD_TEST_POSTGRES")
	if dsn == "" {
		t.Skip("NOT RUN: FLEETD_TEST_POSTGRES names no server")
	}
	checkProgram(t, "storm -n 40 -store pg-hash -dsn "+dsn, []string{" devices/s", " us/device"})
}

func checkProgram(t *testing.T, arguments string, figures []string) {
	t.Helper()
	var out strings.Builder
	if err := run(t.Context(), append(strings.Fields(arguments), "-runs", "1"), &out); err != nil {
		t.Fatal(err)
	}
	for _, after := range figures {
		found := regexp.MustCompile(`[0-9.]+ / ([0-9.]+) / [0-9.]+` + regexp.QuoteMeta(after)).FindStringSubmatch(out.String())
		if found == nil {
			t.Fatalf("no figure before %q in %q", after, &out)
		}
		if median, err := strconv.ParseFloat(found[1], 64); err != nil || median <= 0 {
			t.Errorf("%s%s, %v", found[0], after, err)
		}
	}
}

func TestRefused(t *testing.T) {
	for _, arguments := range []string{"", "nothing", "server", "server nothing", "server udpaudio", "server storm disk -", "toolcall extra", "toolcall -http raw", "toolcall -callers 0", "storm -store pg-hash",
		"wsidle -runs 0", "udpaudio -sessions 3", "udpaudio -pps -1"} {
		if err := run(t.Context(), strings.Fields(arguments), io.Discard); err == nil {
			t.Errorf("%q is accepted", arguments)
		}
	}
}

func TestSeries(t *testing.T) {
	if got := (series{30, 10.04, 20}).text(1); got != "10.0 / 20.0 / 30.0" {
		t.Error(got)
	}
}

func TestSplitReply(t *testing.T) {
	for message, want := range map[string]string{
		`{"session_id":"a","type":"mcp","payload":{"jsonrpc":"2.0","id":41,"result":{"content":[{"text":"}\""}],"n":[1,{}]}}}`: `41 {"content":[{"text":"}\""}],"n":[1,{}]}`,
		" { \"payload\" : {\"result\" : true , \"id\" : 7 } }\n":                                                               "7 true",
	} {
		if id, result, err := splitReply([]byte(message)); err != nil || fmt.Sprintf("%d %s", id, result) != want {
			t.Errorf("%s: %d %s, %v", message, id, result, err)
		}
	}
	for _, bad := range []string{"", "{", "[]", `{"payload"}`, `{"payload":{"id":1}}`, `{"payload":{"id":"x","result":1}}`, `{"payload":{"id":1,"result":{]}}}`, `{"a`, `{"a":"\`} {
		if id, result, err := splitReply([]byte(bad)); err == nil {
			t.Errorf("%q: %d %s", bad, id, result)
		}
	}
}

func TestSplitPage(t *testing.T) {
	for message, want := range map[string]string{
		`{"payload":{"id":2,"result":{"tools":[{"name":"a"}],"nextCursor":"b"}}}`: `{"name":"a"} b`,
		`{"payload":{"id":3,"result":{"tools":[{"name":"b"}]}}}`:                  `{"name":"b"} `,
	} {
		if tools, cursor, err := splitPage([]byte(message)); err != nil || string(tools)+" "+string(cursor) != want {
			t.Errorf("%s: %s %s, %v", message, tools, cursor, err)
		}
	}
	if _, _, err := splitPage([]byte(`{"payload":{"id":3,"error":{}}}`)); err == nil {
		t.Error("an error is taken for a page")
	}
}

// A packet is decrypted with its device's key and encrypted with the peer's, as the standard library does it; a counter
// that overflows carries. What is not a packet, or an old one, is not passed on.
func TestPass(t *testing.T) {
	r := relay{sessions: map[uint32]*audioSession{}, forward: true}
	var streams []cipher.Block
	for i := range 2 {
		block, err := aes.NewCipher(bytes.Repeat([]byte{byte(i)}, aes.BlockSize))
		if err != nil {
			t.Fatal(err)
		}
		streams = append(streams, block)
		r.sessions[uint32(i)] = &audioSession{source: uint32(i), block: block}
	}
	r.sessions[0].peer, r.sessions[1].peer = r.sessions[1], r.sessions[0]
	const speech = "ninety bytes or so, which is more than a block of the cipher"
	packet := append(make([]byte, audioHeader), speech...)
	packet[0] = audioType
	binary.BigEndian.PutUint16(packet[2:], uint16(len(speech)))
	binary.BigEndian.PutUint32(packet[8:], 0xffffffff)
	binary.BigEndian.PutUint32(packet[12:], 0xfffffffe)
	cipher.NewCTR(streams[0], packet[:audioHeader]).XORKeyStream(packet[audioHeader:], packet[audioHeader:])
	old, short := bytes.Clone(packet), bytes.Clone(packet[:len(packet)-1])
	binary.BigEndian.PutUint32(old[12:], 5)
	if !r.pass(packet, netip.AddrPort{}) {
		t.Fatal("the packet is not passed on")
	}
	if source, seq := binary.BigEndian.Uint32(packet[4:]), binary.BigEndian.Uint32(packet[12:]); source != 1 || seq != 1 {
		t.Errorf("source %d, sequence %d", source, seq)
	}
	cipher.NewCTR(streams[1], packet[:audioHeader]).XORKeyStream(packet[audioHeader:], packet[audioHeader:])
	if string(packet[audioHeader:]) != speech {
		t.Errorf("%q arrives", packet[audioHeader:])
	}
	if r.pass(old, netip.AddrPort{}) || r.pass(short, netip.AddrPort{}) || r.pass(nil, netip.AddrPort{}) || r.packets.Load() != 1 {
		t.Errorf("%d packets are handled", r.packets.Load())
	}
}
