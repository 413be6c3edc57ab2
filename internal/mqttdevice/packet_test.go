package mqttdevice

import (
	"bytes"
	"errors"
	"testing"

	"github.com/eclipse/paho.mqtt.golang/packets"

	"fleetd/internal/devices"
)

func TestParseHeader(t *testing.T) {
	for _, c := range []struct {
		bytes  []byte
		length int
		ok     bool
		err    error
	}{
		{nil, 0, false, nil},
		{[]byte{0x30}, 0, false, nil},
		{[]byte{0x30, 0x7f}, 127, true, nil},
		{[]byte{0x30, 0x80}, 0, false, nil},
		{[]byte{0x30, 0x80, 0x01}, 128, true, nil},
		{[]byte{0x30, 0xff, 0xff, 0x03}, 65535, true, nil},
		{[]byte{0x30, 0xff, 0xff, 0xff, 0x7f}, 0, false, errTooLarge},
		{[]byte{0x30, 0xff, 0xff, 0xff, 0xff}, 0, false, errLength},
		{[]byte{0x00, 0}, 0, false, errType}, {[]byte{0xf0, 0}, 0, false, errType}, {[]byte{0x20, 2}, 0, false, errType},
		{[]byte{0x36, 0}, 0, false, errFlags}, {[]byte{0x81, 0}, 0, false, errFlags}, {[]byte{0xc1, 0}, 0, false, errFlags},
	} {
		h, ok, err := parseHeader(c.bytes, PacketLimit)
		if ok != c.ok || !errors.Is(err, c.err) || ok && h.length != c.length {
			t.Errorf("%x: %+v, %t, %v", c.bytes, h, ok, err)
		}
	}
}

// paho reads the encoded packets.
func TestAppendPublish(t *testing.T) {
	for _, size := range []int{0, 1, 100, 127, 128, 16_383, 16_384, 200_000} {
		payload := bytes.Repeat([]byte{'x'}, size)
		p, err := packets.ReadPacket(bytes.NewReader(appendPublish(nil, []byte("fleetd/d/down"), payload)))
		if err != nil {
			t.Fatalf("%d: %v", size, err)
		}
		if m := p.(*packets.PublishPacket); m.TopicName != "fleetd/d/down" || !bytes.Equal(m.Payload, payload) || m.Qos != 0 || m.Retain || m.Dup {
			t.Errorf("%d: %v", size, m)
		}
	}
}

func TestTopics(t *testing.T) {
	const id = devices.ID("aa:bb:cc:dd:ee:ff")
	for topic, own := range map[string]bool{"fleetd/aabbccddeeff/up": true, "fleetd/aabbccddeeff/down": false, "fleetd/aabbccddee/up": false,
		"fleetd/aabbccddeeff0/up": false, "fleetd/up": false, "fleetd//up": false, "": false, "fleetd/aa:bb:cc:dd:ee:ff/up": false} {
		if isTopicUp([]byte(topic), id) != own {
			t.Errorf("%q: want %t", topic, own)
		}
		if (topic == devices.TopicUp(id)) != own {
			t.Errorf("%q: the two functions disagree", topic)
		}
	}
	for topic, want := range map[string]string{"fleetd/aabbccddeeff/up": "aa:bb:cc:dd:ee:ff up", "fleetd/lamp-1/connected": "lamp-1 connected",
		"fleetd/AABBCCDDEEFF/up": "", "fleetd/x": "", "up": "", "other/x/up": "", "fleetd/+/up": ""} {
		id, leaf, err := deviceOfTopic(topic)
		if (err == nil) != (want != "") || err == nil && string(id)+" "+leaf != want {
			t.Errorf("%q: %s %s %v", topic, id, leaf, err)
		}
	}
}

// Parsing and encoding a PUBLISH allocates nothing.
func TestPublishAllocatesNothing(t *testing.T) {
	packet := appendPublish(nil, []byte("fleetd/aabbccddeeff/up"), []byte(`{"type":"mcp","payload":{}}`))
	buf := make([]byte, 0, 256)
	if n := testing.AllocsPerRun(100, func() {
		h, _, err := parseHeader(packet, PacketLimit)
		p, parseErr := parsePublish(h, packet[h.size:])
		if err != nil || parseErr != nil || !isTopicUp(p.topic, "aa:bb:cc:dd:ee:ff") {
			t.Fatal(err, parseErr)
		}
		buf = appendPublish(buf[:0], []byte("fleetd/aabbccddeeff/down"), p.payload)
	}); n != 0 {
		t.Errorf("%v allocations", n)
	}
}

// A packet whose fields do not fill it exactly is refused; an empty last field is
// accepted.
func TestDecodeWholePackets(t *testing.T) {
	for name, c := range map[string]struct {
		packet string
		ok     bool
	}{
		"empty client id":          {"\x10\x0c\x00\x04MQTT\x04\x02\x00\x3c\x00\x00", true},
		"empty password":           {"\x10\x12\x00\x04MQTT\x04\xc2\x00\x3c\x00\x01a\x00\x01u\x00\x00", true},
		"client id cut off":        {"\x10\x0e\x00\x04MQTT\x04\x02\x00\x3c\x00\x09ab", false},
		"UNSUBSCRIBE":              {"\xa2\x05\x00\x01\x00\x01a", true},
		"UNSUBSCRIBE, topic cut":   {"\xa2\x05\x00\x01\x00\x09a", false},
		"UNSUBSCRIBE, id cut":      {"\xa2\x01\x05", false},
		"SUBSCRIBE":                {"\x82\x06\x00\x01\x00\x01a\x00", true},
		"SUBSCRIBE, id cut":        {"\x82\x01\x05", false},
		"PUBACK, id cut":           {"\x40\x01\x05", false},
		"PINGREQ with a body":      {"\xc0\x01x", false},
		"PUBACK, a byte at end":    {"\x40\x03\x00\x01x", false},
		"DISCONNECT with no body":  {"\xe0\x00", true},
		"SUBSCRIBE, a byte at end": {"\x82\x07\x00\x01\x00\x01a\x00x", false},
	} {
		h, _, err := parseHeader([]byte(c.packet), PacketLimit)
		if err != nil {
			t.Fatal(name, err)
		}
		if p, err := decode(h, []byte(c.packet)[h.size:]); (err == nil) != c.ok {
			t.Errorf("%s: %v, %v", name, p, err)
		}
	}
}
