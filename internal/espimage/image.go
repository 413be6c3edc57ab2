package espimage

import (
	"bufio"
	"bytes"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"hash"
	"io"
	"math"
	"slices"
	"strings"
	"time"
)

// Layout of an image (esp_app_format.h).
const (
	imageMagic     = 0xe9
	headerSize     = 24
	segmentSize    = 8 // of a segment's header
	maxSegments    = 16
	descOffset     = headerSize + segmentSize // the first segment begins with the description
	descSize       = 256
	descMagic      = 0xabcd5432
	checksumSeed   = 0xef
	checksumAlign  = 16
	hashSize       = sha256.Size
	signatureAlign = 4096
	signatureV1    = 68 // version 0, r and s
)

var signatureV2 = []byte{0xe7, 0x02}

const window = 64 << 10

// reader reads an image from a stream, and computes what its end must have.
type reader struct {
	in       *bufio.Reader
	left     int64 // bytes that it may have at most
	read     int64
	checksum byte      // over the data of segments
	content  hash.Hash // over all
	names    finder
	keep     io.Writer
	buffer   []byte
}

var errShort = errors.New("the image ends early")

// next reads n bytes into the buffer and passes them on. Callers read at most a window at once.
func (r *reader) next(n int) ([]byte, error) {
	if int64(n) > r.left {
		return nil, errShort
	}
	piece := r.buffer[:n]
	if _, err := io.ReadFull(r.in, piece); err != nil {
		if errors.Is(err, io.EOF) || errors.Is(err, io.ErrUnexpectedEOF) {
			return nil, errShort
		}
		return nil, err
	}
	r.left -= int64(n)
	r.read += int64(n)
	r.content.Write(piece)
	if _, err := r.keep.Write(piece); err != nil {
		return nil, err
	}
	return piece, nil
}

// readImage reads an application image of at most left bytes. Its bytes, without what follows it, are written to keep. What is wrong
// with its content is in its faults; an error that is a *Fault means that it has no end, any other one is of the reader or of keep.
func readImage(in *bufio.Reader, left int64, keep io.Writer) (*Image, error) {
	r := &reader{in: in, left: left, checksum: checksumSeed, content: sha256.New(), keep: keep, buffer: make([]byte, window)}
	image := &Image{}
	err := r.segments(image)
	if err == nil {
		err = r.end(image)
	}
	switch {
	case errors.Is(err, errShort):
		return nil, fault(FaultTruncated, "The image ends after %d bytes, in the middle of what it announces. The file is not whole: download or build it again.", r.read)
	case err != nil:
		return nil, err
	}
	image.Size = r.read
	r.content.Sum(image.SHA256[:0])
	image.Boards, image.URLs = r.names.boards, r.names.urls
	image.judge()
	return image, nil
}

// segments reads the header and the segments.
func (r *reader) segments(image *Image) error {
	header, err := r.next(headerSize)
	if err != nil {
		return err
	}
	count := int(header[1])
	image.FlashSize = 1 << 20 << min(header[3]>>4, 7)
	image.Chip = Chip(binary.LittleEndian.Uint16(header[12:]))
	image.MinRevision, image.MaxRevision = int(binary.LittleEndian.Uint16(header[15:])), int(binary.LittleEndian.Uint16(header[17:]))
	if image.MaxRevision == math.MaxUint16 { // not set, as 0
		image.MaxRevision = 0
	}
	if count < 1 || count > maxSegments {
		return fault(FaultSegments, "The image announces %d segments; the bootloader reads 1 to %d. The file is damaged or no application image.", count, maxSegments)
	}
	if header[23] == 0 {
		return fault(FaultHash, "The image has no SHA-256 at its end, so that damage cannot be told. Build it without --dont-append-digest.")
	}
	for i := range count {
		header, err := r.next(segmentSize)
		if err != nil {
			return err
		}
		length := int64(binary.LittleEndian.Uint32(header[4:]))
		switch {
		case length > r.left:
			return errShort
		case length%4 != 0:
			return fault(FaultSegments, "Segment %d has %d bytes; the bootloader wants a multiple of 4. The file is damaged: download or build it again.", i+1, length)
		case i == 0 && length < descSize:
			return fault(FaultDesc, "The image has no description of its application, so that it is a bootloader or was not built with ESP-IDF. Give the application image, or the merged binary.")
		}
		for begun := true; length > 0; begun = false {
			piece, err := r.next(int(min(length, window)))
			if err != nil {
				return err
			}
			if i == 0 && begun {
				if err := image.describe(piece); err != nil {
					return err
				}
			}
			for _, b := range piece {
				r.checksum ^= b
			}
			r.names.look(piece)
			length -= int64(len(piece))
		}
	}
	return nil
}

// end reads what follows the segments.
func (r *reader) end(image *Image) error {
	padding, err := r.next(checksumAlign - int(r.read%checksumAlign))
	if err != nil {
		return err
	}
	if last := padding[len(padding)-1]; last != r.checksum {
		image.fault(FaultChecksum, "The checksum is %#02x, and the content has %#02x. The file is damaged: download or build it again.", last, r.checksum)
	}
	want := r.content.Sum(nil)
	sum, err := r.next(hashSize)
	if err != nil {
		return err
	}
	if !bytes.Equal(sum, want) {
		image.fault(FaultHash, "The SHA-256 at the end is not that of the content. The file is damaged: download or build it again.")
	}
	return r.signature(image)
}

// signature reads the signature, if there is one. What else follows stays unread.
func (r *reader) signature(image *Image) error {
	pad := int((signatureAlign - r.read%signatureAlign) % signatureAlign)
	ahead, err := r.in.Peek(int(min(r.left, int64(pad)+signatureAlign)))
	switch {
	case err != nil && !errors.Is(err, io.EOF):
		return err
	case len(ahead) == pad+signatureAlign && bytes.HasPrefix(ahead[pad:], signatureV2):
		image.Signature = SignatureV2
	case len(ahead) == signatureV1 && bytes.HasPrefix(ahead, make([]byte, 4)):
		image.Signature = SignatureV1
	default:
		return nil
	}
	_, err = r.next(len(ahead))
	return err
}

// describe reads the description of the application (esp_app_desc_t).
func (image *Image) describe(raw []byte) error {
	if binary.LittleEndian.Uint32(raw) != descMagic {
		return fault(FaultDesc, "The image has no description of its application, so that it is a bootloader or was not built with ESP-IDF. Give the application image, or the merged binary.")
	}
	image.SecureVersion = binary.LittleEndian.Uint32(raw[4:])
	image.Version, image.Project, image.IDF = text(raw[16:48]), text(raw[48:80]), text(raw[112:144])
	image.Built, _ = time.Parse("Jan _2 2006 15:04:05", text(raw[96:112])+" "+text(raw[80:96])) // the zero time if the build left it out
	if copy(image.ELF[:], raw[144:176]); image.ELF == [32]byte{} {
		return fault(FaultDesc, "The image does not have the SHA-256 of its ELF file, by which a device says what it runs. Build it with ESP-IDF, which writes that.")
	}
	return nil
}

// judge adds the faults of what the description says.
func (image *Image) judge() {
	if chipNames[image.Chip] == "" {
		image.fault(FaultChip, "The image is for chip %d, which is not known here. Give an image for an ESP32 that xiaozhi-esp32 is built for.", uint16(image.Chip))
	}
	version, ok := Version(image.Version)
	switch {
	case !ok || len(version) == 0:
		image.fault(FaultAborts, "The version %q aborts the firmware that reads it: each part between dots must begin with digits up to 2147483647. Build the image with another PROJECT_VER.", image.Version)
	case IsTooOld(version):
		image.fault(FaultTooOld, "The version %s is older than 1.8.0: such a device restarts after each failed upgrade, as long as it is offered. Give a newer image.", image.Version)
	}
}

func (image *Image) fault(code, format string, args ...any) {
	image.Faults = append(image.Faults, *fault(code, format, args...))
}

// text is a text of fixed length, up to its first NUL, in which only printable ASCII is left.
func text(raw []byte) string {
	raw, _, _ = bytes.Cut(raw, []byte{0})
	return strings.Map(func(c rune) rune {
		if c < ' ' || c > '~' {
			return '?'
		}
		return c
	}, string(raw))
}

// finder finds the literals of a program that say its board and its OTA URL, also where they are at the border of two pieces.
type finder struct {
	tail   []byte
	boards []string
	urls   []string
}

const (
	maxLiteral = 512 // bytes of a literal, with what is before it
	maxFound   = 8   // of a kind
)

// Before the name of a board, and behind it (mcp_server.cc, since v1.7.0).
var (
	beforeBoard = []byte(`"serverInfo":{"name":"`)
	behindBoard = []byte(`","version":"`)
	behindURL   = []byte("/ota/\x00")
	schemes     = [][]byte{[]byte("http://"), []byte("https://")}
)

// look looks through the next piece of the program.
func (f *finder) look(piece []byte) {
	f.tail = append(f.tail, piece...)
	for rest := f.tail; ; {
		at := bytes.Index(rest, beforeBoard)
		if at < 0 {
			break
		}
		rest = rest[at+len(beforeBoard):]
		if name, _, found := bytes.Cut(rest[:min(len(rest), maxLiteral)], behindBoard); found {
			add(&f.boards, name)
		}
	}
	for rest := f.tail; ; {
		at := bytes.Index(rest, behindURL)
		if at < 0 {
			break
		}
		literal := rest[max(0, at-maxLiteral) : at+len(behindURL)-1]
		if before := bytes.LastIndexByte(literal, 0); before >= 0 {
			literal = literal[before+1:]
		}
		for _, scheme := range schemes {
			if begin := bytes.Index(literal, scheme); begin >= 0 {
				add(&f.urls, literal[begin:])
				break
			}
		}
		rest = rest[at+len(behindURL):]
	}
	f.tail = append(f.tail[:0], f.tail[max(0, len(f.tail)-2*maxLiteral):]...)
}

// add adds a literal that is not known yet and that people can read.
func add(to *[]string, literal []byte) {
	value := string(literal)
	if len(*to) < maxFound && value != "" && text(literal) == value && !slices.Contains(*to, value) {
		*to = append(*to, value)
	}
}
