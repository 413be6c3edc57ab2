package firmware

import (
	"crypto/sha256"
	"encoding/binary"
	"encoding/hex"
	"errors"
	"fmt"
	"hash"
	"hash/maphash"
	"time"
)

var errAudio = errors.New("malformed binary frame")

// packAudio wraps one Opus packet for protocol version 1, 2 or 3 (main/protocols/protocol.h:17-31); any other version
// is framed like 1.
func packAudio(b []byte, version int32, timestamp uint32, opus []byte) []byte {
	switch version {
	case 2:
		b = append(b, 0, 2, 0, 0, 0, 0, 0, 0)
		b = binary.BigEndian.AppendUint32(b, timestamp)
		b = binary.BigEndian.AppendUint32(b, uint32(len(opus)))
	case 3:
		b = append(b, 0, 0)
		b = binary.BigEndian.AppendUint16(b, uint16(len(opus)))
	}
	return append(b, opus...)
}

// unpackAudio is the reverse for packets from the server. The firmware trusts payload_size: a size beyond the message
// makes it read foreign memory, which is reported as errAudio; a smaller one plays the beginning only.
func unpackAudio(version int32, msg []byte) (opus []byte, timestamp uint32, err error) {
	head, size := 0, len(msg)
	switch version {
	case 2:
		head = 16
		if len(msg) >= head {
			timestamp = binary.BigEndian.Uint32(msg[8:])
			size = int(binary.BigEndian.Uint32(msg[12:]))
		}
	case 3:
		head = 4
		if len(msg) >= head {
			size = int(binary.BigEndian.Uint16(msg[2:]))
		}
	default:
		return msg, 0, nil
	}
	if len(msg) < head {
		return nil, 0, fmt.Errorf("%w: %d bytes, the header of version %d needs %d", errAudio, len(msg), version, head)
	}
	if size > len(msg)-head {
		return nil, 0, fmt.Errorf("%w: payload_size %d, but %d bytes are there", errAudio, size, len(msg)-head)
	}
	return msg[head : head+size], timestamp, nil
}

// audioStats counts audio; it exists only on devices that saw some.
type audioStats struct {
	sent, received, played uint64
	sentSum, receivedSum   hash.Hash

	spoken, audible     uint64
	spokenSum, heardSum hash.Hash

	notSpeaking, queueFull, cutOff, resetByStart uint64

	speaker playout
	echo    echoCheck
}

func (s *deviceStats) audioLocked() *audioStats {
	if s.audio == nil {
		s.audio = &audioStats{sentSum: sha256.New(), receivedSum: sha256.New(), spokenSum: sha256.New(), heardSum: sha256.New()}
	}
	return s.audio
}

// play moves what the loudspeaker has begun to the figures.
func (a *audioStats) play(now time.Time, seed maphash.Seed) {
	a.speaker.begun(now, func(opus []byte) {
		a.audible++
		a.heardSum.Write(opus)
		a.echo.hear(maphash.Bytes(seed, opus), len(opus) <= dtxFrame)
	})
}

func hexSum(h hash.Hash) string { return hex.EncodeToString(h.Sum(nil)) }

// onAudio takes one binary WebSocket message.
func (d *Device) onAudio(msg []byte) {
	d.mu.Lock()
	opus, _, err := unpackAudio(d.wsVersion, msg)
	if err == nil {
		d.takeAudioLocked(opus)
	}
	d.mu.Unlock()
	if err != nil {
		d.fail(fmt.Errorf("%w: %w", errCrash, err))
	}
}

// takeAudioLocked takes one Opus packet of the server. It is played only in the speaking state (main/application.cc:518-522).
func (d *Device) takeAudioLocked(opus []byte) {
	now := time.Now()
	a := d.stats.audioLocked()
	a.received++
	a.receivedSum.Write(opus)
	a.play(now, d.fleet.hashSeed)
	switch {
	case d.app != appSpeaking:
		a.notSpeaking++
	case !a.speaker.push(now, opus, d.playFrame):
		a.queueFull++
	default:
		a.played++
	}
}

// takeAudioParamsLocked keeps the frame duration of the server's hello; one not given stays as it was.
func (d *Device) takeAudioParamsLocked(params value) {
	if ms := params.get("frame_duration"); params.is(jsonObject) && ms.is(jsonNumber) && ms.int32() > 0 {
		d.playFrame = time.Duration(ms.int32()) * time.Millisecond
	}
}

// sendVoice sends the next packet of the recording, or of the silence after it. live distinguishes an utterance from the
// audio of the wake word.
func (d *Device) sendVoice(speech, live bool) {
	var buf [256]byte
	d.mu.Lock()
	if d.out == nil {
		d.mu.Unlock()
		return
	}
	voice := &d.fleet.voice
	a := d.stats.audioLocked()
	packet := ""
	if speech {
		packet = voice.speech[d.talk.position%len(voice.speech)]
		d.talk.position++
	} else {
		packet = voice.silence[d.talk.silent%len(voice.silence)]
		d.talk.silent++
	}
	sum := derive(0, d.clientID, "voice")
	opus := mark(buf[:0], packet, binary.BigEndian.Uint64(sum[:]), a.sent)
	a.sent++
	a.sentSum.Write(opus)
	if speech && live {
		a.spoken++
		a.spokenSum.Write(opus)
	}
	a.echo.speak(maphash.Bytes(d.fleet.hashSeed, opus))
	out, version, udp := d.out, d.wsVersion, d.mqtt != nil
	d.mu.Unlock()
	if udp {
		d.sendUDP(opus)
		return
	}
	room := getBuffer()
	*room = packAudio(appendFrameRoom(*room), version, 0, opus)
	d.write(out, opBinary, room)
}

// sendGarbage is the fault bad-frame: audio before the hello, then frames no firmware would send.
func (d *Device) sendGarbage(out link, beforeHello bool) {
	send := func(opcode byte, data string) {
		room := getBuffer()
		*room = append(appendFrameRoom(*room), data...)
		d.write(out, opcode, room)
	}
	if beforeHello {
		send(opBinary, "\xf8\xff\xfe")
		return
	}
	d.sendGarbageText()
	send(opBinary, "")
	send(opBinary, "\x00\x02\x00\x00\x00\x00\x00\x00\x00\x00\x03\x09")
	send(opBinary, "\x00\x02\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x00\x64abc")
	send(opBinary, "\x00\x00\xff\xff\x00")
}

// sendGarbageText is the part of bad-frame that every transport has.
func (d *Device) sendGarbageText() {
	for _, s := range []string{`{"type":"listen","state":"detect","text":"say "hi""}`, `[1,2`, `{"no":"type"}`, ""} {
		d.sendText(s)
	}
}
