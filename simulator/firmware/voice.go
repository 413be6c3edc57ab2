package firmware

import (
	_ "embed"
	"encoding/binary"
	"errors"
)

// voiceFile is made by voice/make.py: real Opus packets of a synthesised voice.
//
//go:embed voice/frames.bin
var voiceFile string

// recording is the voice every device speaks with, and what its microphone sends while nobody speaks.
type recording struct {
	speech, silence []string
}

// openRecording splits the bundled file: two counts, then packets after their lengths.
func openRecording(file string) (recording, error) {
	bad := errors.New("bundled recording is damaged: run simulator/firmware/voice/make.py")
	number := func() int {
		if len(file) < 2 {
			return -1
		}
		n := int(binary.BigEndian.Uint16([]byte(file[:2])))
		file = file[2:]
		return n
	}
	speech, silence := number(), number()
	if speech < 1 || silence < 1 {
		return recording{}, bad
	}
	packets := make([]string, 0, speech+silence)
	for range speech + silence {
		n := number()
		if n < 1 || n > len(file) {
			return recording{}, bad
		}
		packets = append(packets, file[:n])
		file = file[n:]
	}
	return recording{speech: packets[:speech], silence: packets[speech:]}, nil
}

const (
	// dtxFrame is the longest packet that means "nothing to hear" (RFC 6716, section 2.1.9).
	dtxFrame = 2
	// markLength is the padding that carries device and counter.
	markLength = 16
)

// mark appends the packet so that no two are alike: code 0 becomes code 3 with one frame and a padding (RFC 6716,
// section 3.2.5), whose content every decoder must ignore. It holds key and n. Packets of discontinuous transmission
// stay as short as they are.
func mark(b []byte, packet string, key, n uint64) []byte {
	if len(packet) <= dtxFrame {
		return append(b, packet...)
	}
	b = append(b, packet[0]|3, 0x40|1, markLength)
	b = append(b, packet[1:]...)
	b = binary.BigEndian.AppendUint64(b, key)
	return binary.BigEndian.AppendUint64(b, n)
}
