package firmware

import (
	"crypto/aes"
	"crypto/cipher"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
)

const (
	udpHeader = 16
	// laxLeast is the smallest packet up to v2.3.0, which compares with sizeof(std::string).
	laxLeast = 24
	// udpRoom is the receive buffer of the network component; longer datagrams lose their end.
	udpRoom = 1500
)

// Verdict is what the device does with a datagram (main/protocols/mqtt_protocol.cc:289-334).
type Verdict uint8

const (
	Accepted Verdict = iota
	TooShort
	BadType
	BadLength
	OldSequence
	Empty
	verdicts
)

// String is the name of the verdict in the report.
func (v Verdict) String() string { return verdictNames()[v] }

func verdictNames() [verdicts]string {
	return [...]string{"accepted", "too_short", "bad_type", "bad_length", "old_sequence", "empty"}
}

// udpKeys encrypts and decrypts the audio of one device: AES-128-CTR with the packet's own header as the first counter
// block (main/protocols/mqtt_protocol.cc:180-212, 267-334). Not safe for concurrent use.
type udpKeys struct {
	block         cipher.Block // nil before the first hello
	nonce         []byte
	local, remote uint32
	lax           bool // up to v2.3.0
}

func newUDPKeys(key, nonce []byte, lax bool) (udpKeys, error) {
	block, err := aes.NewCipher(key)
	return udpKeys{block: block, nonce: nonce, lax: lax}, err
}

// seal appends one packet. An empty payload cannot be encrypted; it burns a sequence number and nothing is appended.
func (k *udpKeys) seal(b, opus []byte, timestamp uint32) []byte {
	k.local++
	if len(opus) == 0 || k.block == nil {
		return b
	}
	at := len(b)
	b = append(b, k.nonce...)
	h := b[at:]
	binary.BigEndian.PutUint16(h[2:], uint16(len(opus)))
	binary.BigEndian.PutUint32(h[8:], timestamp)
	binary.BigEndian.PutUint32(h[12:], k.local)
	body := len(b)
	b = append(b, opus...)
	cipher.NewCTR(k.block, b[at:at+udpHeader]).XORKeyStream(b[body:], b[body:])
	return b
}

// open decrypts packet in place. missing is how many sequence numbers were skipped.
func (k *udpKeys) open(packet []byte) (opus []byte, missing uint32, verdict Verdict) {
	// Up to v2.3.0 the header is as long as the nonce that came in the hello.
	head, least := udpHeader, udpHeader
	if k.lax {
		head, least = len(k.nonce), laxLeast
	}
	if len(packet) < max(head, least) {
		return nil, 0, TooShort
	}
	if packet[0] != 1 {
		return nil, 0, BadType
	}
	sequence := binary.BigEndian.Uint32(packet[12:])
	switch {
	case !k.lax && int(binary.BigEndian.Uint16(packet[2:])) != len(packet)-udpHeader:
		return nil, 0, BadLength
	case sequence < k.remote || (sequence == k.remote && !k.lax):
		return nil, 0, OldSequence
	case len(packet) == head:
		return nil, 0, Empty
	}
	if sequence > k.remote {
		missing = sequence - k.remote - 1
	}
	k.remote = sequence
	opus = packet[head:]
	cipher.NewCTR(k.block, packet[:udpHeader]).XORKeyStream(opus, opus)
	return opus, missing, Accepted
}

// udpOffer is the udp part of a server hello.
type udpOffer struct {
	server     string
	port       int
	key, nonce []byte
}

var errOffer = errors.New("server hello refused")

// readOffer is the second half of ParseServerHello: since v2.4.0 every member is checked, before that a missing one is
// a null dereference (errCrash) and nonsense is taken as it comes.
func readOffer(udp value, lax bool) (udpOffer, error) {
	if !udp.is(jsonObject) {
		return udpOffer{}, fmt.Errorf("%w: no udp object", errOffer)
	}
	server, port, key, nonce := udp.get("server"), udp.get("port"), udp.get("key"), udp.get("nonce")
	if lax {
		if !server.is(jsonString) || !port.ok() || !key.is(jsonString) || !nonce.is(jsonString) {
			return udpOffer{}, fmt.Errorf("%w: server hello without udp server, port, key or nonce before v2.4.0", errCrash)
		}
		o := udpOffer{server: server.string(), key: make([]byte, 16), nonce: laxHex(nonce.string())}
		if port.is(jsonNumber) {
			o.port = int(port.int32())
		}
		if len(o.nonce) < udpHeader {
			return udpOffer{}, fmt.Errorf("%w: a nonce of %d bytes is written after its end before v2.4.0", errCrash, len(o.nonce))
		}
		copy(o.key, laxHex(key.string()))
		return o, nil
	}
	o := udpOffer{server: server.string()}
	if !server.is(jsonString) || o.server == "" {
		return o, fmt.Errorf("%w: udp.server is not a string", errOffer)
	}
	if o.port = int(port.int32()); !port.is(jsonNumber) || o.port < 1 || o.port > 65535 {
		return o, fmt.Errorf("%w: udp.port is not a number from 1 to 65535", errOffer)
	}
	var err error
	if o.key, err = exactHex("key", key); err == nil {
		o.nonce, err = exactHex("nonce", nonce)
	}
	return o, err
}

func exactHex(name string, v value) ([]byte, error) {
	b, err := hex.DecodeString(v.string())
	if !v.is(jsonString) || err != nil || len(b) != 16 {
		return nil, fmt.Errorf("%w: udp.%s is not 16 bytes in hex", errOffer, name)
	}
	return b, nil
}

// laxHex reads a character that is not a hex digit as 0.
func laxHex(s string) []byte {
	digit := func(i int) byte {
		if i >= len(s) {
			return 0
		}
		switch c := s[i]; {
		case c >= '0' && c <= '9':
			return c - '0'
		case c >= 'A' && c <= 'F':
			return c - 'A' + 10
		case c >= 'a' && c <= 'f':
			return c - 'a' + 10
		}
		return 0
	}
	b := make([]byte, 0, (len(s)+1)/2)
	for i := 0; i < len(s); i += 2 {
		b = append(b, digit(i)<<4|digit(i+1))
	}
	return b
}
