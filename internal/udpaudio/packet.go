package udpaudio

import (
	"crypto/cipher"
	"crypto/subtle"
	"encoding/binary"
)

// Sizes of a packet, in bytes.
const (
	HeaderSize = 16
	// MaxPayload is the longest Opus packet in either direction. The device
	// receives into 1,500 bytes (esp-ml307 esp_udp.cc), the EC801E modem sends
	// at most 1,460 with the header.
	MaxPayload = 1400
	maxPacket  = HeaderSize + MaxPayload
)

// Bytes of the header that differ between the directions, so that both can use one key
// without sharing keystream. The device ignores flags and ssrc of received packets
// (mqtt_protocol.cc:267-334).
const (
	packetType   = 0x01
	flagDownlink = 0x80
	ssrcDownlink = 0x01000000
)

// header is the first 16 bytes of a packet, and its AES-CTR IV.
type header struct {
	flags               byte
	ssrc                uint32
	timestamp, sequence uint32
}

// parse checks the format of one datagram. It returns the verdict Accepted, Short,
// BadType, TooLong, BadLength or Empty.
func parse(b []byte) (header, Verdict) {
	switch {
	case len(b) < HeaderSize:
		return header{}, Short
	case b[0] != packetType:
		return header{}, BadType
	case len(b) > maxPacket:
		return header{}, TooLong
	case int(binary.BigEndian.Uint16(b[2:])) != len(b)-HeaderSize:
		return header{}, BadLength
	case len(b) == HeaderSize:
		return header{}, Empty
	}
	return header{
		flags:     b[1],
		ssrc:      binary.BigEndian.Uint32(b[4:]),
		timestamp: binary.BigEndian.Uint32(b[8:]),
		sequence:  binary.BigEndian.Uint32(b[12:]),
	}, Accepted
}

// seal encrypts one Opus packet of 1 to MaxPayload bytes into dst and returns the length
// of the datagram.
func seal(dst *[maxPacket]byte, block cipher.Block, h header, opus []byte, c *ctr) int {
	dst[0], dst[1] = packetType, h.flags
	binary.BigEndian.PutUint16(dst[2:], uint16(len(opus)))
	binary.BigEndian.PutUint32(dst[4:], h.ssrc)
	binary.BigEndian.PutUint32(dst[8:], h.timestamp)
	binary.BigEndian.PutUint32(dst[12:], h.sequence)
	n := HeaderSize + copy(dst[HeaderSize:], opus)
	c.xor(block, (*[HeaderSize]byte)(dst[:]), dst[HeaderSize:n])
	return n
}

// ctr is CTR mode without allocations: its owner keeps the keystream buffer. It is not
// safe for concurrent use.
type ctr struct {
	in  [16]byte
	out [256]byte
}

// xor encrypts or decrypts p in place. The counter is 128 bits, big-endian, and starts at
// iv, as in the device's mbedtls.
func (c *ctr) xor(block cipher.Block, iv *[HeaderSize]byte, p []byte) {
	hi, lo := binary.BigEndian.Uint64(iv[:8]), binary.BigEndian.Uint64(iv[8:])
	for len(p) > 0 {
		n := min(len(p), len(c.out))
		for i := 0; i < n; i += 16 {
			binary.BigEndian.PutUint64(c.in[:8], hi)
			binary.BigEndian.PutUint64(c.in[8:], lo)
			block.Encrypt(c.out[i:i+16], c.in[:])
			if lo++; lo == 0 {
				hi++
			}
		}
		subtle.XORBytes(p[:n], p[:n], c.out[:n])
		p = p[n:]
	}
}
