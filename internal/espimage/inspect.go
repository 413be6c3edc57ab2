package espimage

import (
	"archive/zip"
	"bufio"
	"bytes"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"math"
	"path"
	"strings"
)

// Limits of a file.
const (
	maxFiles     = 64        // that a zip may have
	maxName      = 255       // bytes of one of their names, which stands in the image and beside all that is dropped
	maxDirectory = 128 << 10 // bytes: those of so many files with their names, and the 66 KiB in which its end may be
	maxImages    = 16        // in one file
)

// Inspect reads a file of this size; most is how many bytes it may have, unpacked. For each image keep is asked for a writer, to which
// the bytes of the image go; done is called when it is read, with what it is, or nil if it has no end. A nil keep keeps nothing. Errors are those of
// the reader and of keep; what is wrong with the file is in it.
func Inspect(in io.ReaderAt, size, most int64, keep func() (to io.Writer, done func(*Image) error, err error)) (*File, error) {
	s := &scan{file: &File{}, most: most, keep: keep}
	if keep == nil {
		s.keep = func() (io.Writer, func(*Image) error, error) {
			return io.Discard, func(*Image) error { return nil }, nil
		}
	}
	err := s.all(in, size)
	if problem, ok := errors.AsType[*Fault](err); ok {
		s.file.Faults = append(s.file.Faults, *problem)
		err = nil
	}
	if err != nil {
		return nil, err
	}
	if len(s.file.Images) == 0 && len(s.file.Faults) == 0 {
		s.file.Faults = append(s.file.Faults, *fault(FaultNoApp, "The file has no application image. Give an application image, a merged binary or the zip of a release."))
	}
	return s.file, nil
}

// scan is the reading of one file.
type scan struct {
	file *File
	most int64 // bytes that may still be unpacked
	keep func() (io.Writer, func(*Image) error, error)
}

var zipMagic = []byte("PK\x03\x04")

func (s *scan) all(in io.ReaderAt, size int64) error {
	if size > s.most {
		return fault(FaultTooLarge, "The file has %d bytes, and at most %d are allowed. Give the application image alone, or raise --firmware-limit.", size, s.most)
	}
	head := make([]byte, len(zipMagic))
	if n, err := in.ReadAt(head, 0); n < len(head) {
		if err != nil && !errors.Is(err, io.EOF) {
			return err
		}
		return fault(FaultUnknown, "The file has %d bytes, which is no firmware. Give an application image, a merged binary or the zip of a release.", size)
	}
	if bytes.Equal(head, zipMagic) {
		return s.zip(in, size)
	}
	return s.binary("", size, func() (io.ReadCloser, error) { return io.NopCloser(io.NewSectionReader(in, 0, size)), nil })
}

// zip reads the binaries of a zip.
func (s *scan) zip(in io.ReaderAt, size int64) error {
	limited := &directory{in, maxDirectory}
	archive, err := zip.NewReader(limited, size)
	switch {
	case limited.left < 0 || err == nil && len(archive.File) > maxFiles:
		return fault(FaultZip, "The zip has more than the %d files that are read. Give the zip of one release.", maxFiles)
	case err != nil:
		return fault(FaultZip, "The zip cannot be read (%v). The file is damaged: download it again.", err)
	}
	limited.left = math.MaxInt // for the files
	for _, member := range archive.File {
		if !strings.EqualFold(path.Ext(member.Name), ".bin") {
			continue
		}
		if err := s.member(member); err != nil {
			return err
		}
	}
	return nil
}

// directory limits what is read to open a zip: the library keeps all files that the directory names, whatever their number.
type directory struct {
	io.ReaderAt
	left int // bytes
}

// ReadAt implements io.ReaderAt.
func (d *directory) ReadAt(to []byte, at int64) (int, error) {
	if d.left -= len(to); d.left < 0 {
		return 0, errors.New("the directory is too large")
	}
	return d.ReaderAt.ReadAt(to, at)
}

// member reads a binary of a zip. What is wrong with it does not keep others from being read.
func (s *scan) member(member *zip.File) error {
	name, size := text([]byte(path.Base(member.Name))), int64(member.UncompressedSize64)
	var err error
	switch {
	case len(name) > maxName:
		err = fault(FaultZip, "The name of this file in the zip has %d bytes, and a name may have %d. Pack the zip again.", len(name), maxName)
		name = name[:maxName]
	case member.UncompressedSize64 > uint64(s.most):
		err = fault(FaultTooLarge, "It has %d bytes unpacked, and %d are left of those that are allowed. Give the files of the zip one by one, or raise --firmware-limit.", member.UncompressedSize64, s.most)
	default:
		s.most -= size
		err = s.binary(name, size, func() (io.ReadCloser, error) {
			content, err := member.Open()
			if err != nil {
				return nil, fault(FaultZip, "It cannot be unpacked (%v). Pack the zip again.", err)
			}
			return packed{io.LimitReader(content, size), content}, nil
		})
	}
	if problem, ok := errors.AsType[*Fault](err); ok {
		problem.File = name
		s.file.Faults = append(s.file.Faults, *problem)
		err = nil
	}
	return err
}

// packed makes an error of a damaged member a fault.
type packed struct {
	io.Reader
	io.Closer
}

func (p packed) Read(to []byte) (int, error) {
	n, err := p.Reader.Read(to)
	if err != nil && !errors.Is(err, io.EOF) {
		err = fault(FaultZip, "It cannot be unpacked (%v). The zip is damaged: download it again.", err)
	}
	return n, err
}

// opener opens a file at its beginning.
type opener func() (io.ReadCloser, error)

// binary reads an application image or the content of a flash.
func (s *scan) binary(name string, size int64, open opener) error {
	content, err := open()
	if err != nil {
		return err
	}
	defer func() { _ = content.Close() }()
	in := bufio.NewReaderSize(content, window)
	head, err := in.Peek(tableOffset + tableSize)
	if err != nil && !errors.Is(err, io.EOF) {
		return err
	}
	switch {
	case isPack(head, size):
		if name == "" {
			return fault(FaultAssets, "This is a pack of assets (fonts, sounds, wake words) without an application. Packs alone are not taken yet: give the application image, the merged binary or the zip of the release.")
		}
		s.drop(name, "a pack of assets")
		return nil
	case !isApp(head) && len(head) == tableOffset+tableSize && bytes.HasPrefix(head[tableOffset:], entryMagic):
		table, err := readTable(head[tableOffset:])
		if err != nil {
			return err
		}
		return s.merged(name, size, open, table)
	case name != "" && len(head) >= descOffset+4 && head[0] == imageMagic && !isApp(head):
		s.drop(name, "an image without the description of an application, such as a bootloader")
		return nil
	case len(head) > 0 && head[0] == imageMagic:
		image, err := s.image(name, in, nil, size)
		if err == nil && image.Size < size {
			s.drop(name, fmt.Sprintf("%d bytes behind the image", size-image.Size))
		}
		return err
	case name != "":
		s.drop(name, "a file of another kind")
		return nil
	}
	return fault(FaultUnknown, "This is no firmware: an application image begins with the byte 0xE9, and the content of a flash has a partition table at 0x8000. Give an application image, a merged binary or the zip of a release.")
}

// merged cuts the application out of the content of a flash. A build with a factory partition has it there, and an empty ota_0.
func (s *scan) merged(name string, size int64, open opener, table []Partition) error {
	for _, slot := range appsOf(table) {
		if slot.Offset < tableOffset+tableSize || slot.Offset >= size {
			continue
		}
		if found, err := s.cut(name, size, open, table, slot); found || err != nil {
			return err
		}
	}
	return fault(FaultNoApp, "The file is the content of a flash, and no application image is in its partition ota_0 or factory. Give the application image.")
}

// cut reads the application of a partition, and reports whether there is one.
func (s *scan) cut(name string, size int64, open opener, table []Partition, slot *Partition) (found bool, err error) {
	content, err := open()
	if err != nil {
		return false, err
	}
	defer func() { _ = content.Close() }()
	in := bufio.NewReaderSize(content, window)
	if _, err := io.CopyN(io.Discard, in, slot.Offset); err != nil {
		return false, eofFault(err)
	}
	if first, err := in.Peek(1); err != nil || first[0] != imageMagic {
		return false, eofFault(err)
	}
	for i := range table {
		if p := &table[i]; p != slot && !p.isState() && p.Offset < size {
			s.drop(name, fmt.Sprintf("the partition %s", p.Label))
		}
	}
	_, err = s.image(name, in, table, min(slot.Size, size-slot.Offset))
	return true, err
}

func eofFault(err error) error {
	if errors.Is(err, io.EOF) {
		return fault(FaultTruncated, "The file ends before its application. It is not whole: download it again.")
	}
	return err
}

// image reads an application image; table is that of the flash that it was cut out of.
func (s *scan) image(name string, in *bufio.Reader, table []Partition, left int64) (*Image, error) {
	if len(s.file.Images) == maxImages {
		return nil, fault(FaultZip, "The zip has more than %d images. Give the zip of one release.", maxImages)
	}
	to, done, err := s.keep()
	if err != nil {
		return nil, err
	}
	image, err := readImage(in, left, to)
	if err != nil {
		return nil, errors.Join(err, done(nil))
	}
	image.File, image.Layout, image.Merged = name, table, table != nil
	for i := range image.Faults {
		image.Faults[i].File = name
	}
	if err := done(image); err != nil {
		return nil, err
	}
	s.file.Images = append(s.file.Images, image)
	return image, nil
}

func (s *scan) drop(name, what string) {
	if name != "" {
		what = name + ": " + what
	}
	s.file.Dropped = append(s.file.Dropped, what)
}

// isApp reports whether a file begins with an application image, as opposed to a bootloader.
func isApp(head []byte) bool {
	return len(head) >= descOffset+4 && head[0] == imageMagic && binary.LittleEndian.Uint32(head[descOffset:]) == descMagic
}

// isPack reports whether a file is a pack of assets: the number of its files, a sum, and how many bytes follow (assets.cc).
func isPack(head []byte, size int64) bool {
	const packHeader, packEntry = 12, 44
	if len(head) < packHeader+packEntry || head[0] == imageMagic && head[1] != 0 {
		return false
	}
	files, length := int64(binary.LittleEndian.Uint32(head)), int64(binary.LittleEndian.Uint32(head[8:]))
	return files > 0 && files*packEntry <= length && length+packHeader == size
}
