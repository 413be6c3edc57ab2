// Package firmware keeps firmware images, and says which devices could get them. An image is named by the SHA-256 of its bytes. They
// are in an object store of NATS, and on the disk of every node that has served them; what was read of them, and what people say about
// them, is in the database. Nothing is given to a device here.
package firmware

import (
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/nats-io/nats.go/jetstream"

	"fleetd/internal/access"
	"fleetd/internal/api"
	"fleetd/internal/cleantext"
	"fleetd/internal/clock"
	"fleetd/internal/devices"
	"fleetd/internal/espimage"
	"fleetd/internal/selector"
)

// Bounds.
const (
	// Digits are enough of an image's SHA-256 to name it.
	Digits = 12
	// MaxImages is how many images a fleet keeps.
	MaxImages = 2000
	maxNote   = 1000 // bytes
	maxBoard  = 64   // bytes of a board's name
)

// Image is a stored image: what was read of it, and what people say about it.
type Image struct {
	espimage.Image
	Note    string
	ByHand  []string // boards that somebody set in place of those of the program; nil: none
	AddedBy string   // name of the key
	AddedAt time.Time
}

// ID returns the name of the image, 64 hex digits.
func (i *Image) ID() string { return hex.EncodeToString(i.SHA256[:]) }

// ELFText returns the name of the build that devices report, 64 hex digits.
func (i *Image) ELFText() string { return hex.EncodeToString(i.ELF[:]) }

// Store keeps the rows of images, and knows which images devices have. Its errors wrap devices.ErrDatabase, or devices.ErrNotFound.
type Store interface {
	// Images returns all images, newest first.
	Images(ctx context.Context) ([]Image, error)
	// Add adds all these images or none, except those that are there, and returns which it added; permit may refuse, based on what is
	// stored.
	Add(ctx context.Context, images []Image, permit func(count int, bytes int64) error) (added []Image, err error)
	// Edit changes what is not nil; no boards restore those of the image.
	Edit(ctx context.Context, id string, note *string, boards *[]string) error
	// Delete deletes an image; permit may refuse, and no job for the image is created meanwhile.
	Delete(ctx context.Context, id string, permit func() error) error
	// Running returns how many devices run each of these builds, and Former how many had one before the build that they run.
	Running(ctx context.Context, elfs []string) (map[string]int64, error)
	Former(ctx context.Context, elf string) (int64, error)
	// Newest returns what these devices ran at their last checks, if that is known.
	Newest(ctx context.Context, ids []devices.ID) (map[devices.ID]devices.DeviceImage, error)
	// History returns the images of a device, newest first.
	History(ctx context.Context, id devices.ID) ([]devices.DeviceImage, error)
}

// Fleet is what a Manager uses of the core.
type Fleet interface {
	Get(ctx context.Context, id devices.ID) (devices.View, error)
	Views(ctx context.Context, ids []devices.ID) ([]devices.View, error)
	List(ctx context.Context, q devices.ListQuery) (views []devices.View, next string, err error)
	Each(ctx context.Context, principal access.Principal, sel selector.Selector, f func([]devices.View) error) error
	// NoteChange records a change, or the attempt, in the audit.
	NoteChange(principal access.Principal, action string, id devices.ID, detail string, err error)
}

// Options of a Manager. All are required but Replicas and Keys.
type Options struct {
	Store     Store
	Fleet     Fleet
	JetStream jetstream.JetStream
	Bucket    string // object store, created with the first image
	Replicas  int    // of the bucket; 0 means 1
	Dir       string // of the files on this node
	MaxFile   int64  // bytes of a file, unpacked
	Storage   int64  // bytes of all images
	Keys      Keys
	Server    string // URL under which devices reach the fleet
	// Bars returns why devices get no firmware for now, of those for which that is so.
	Bars func(ctx context.Context, ids []devices.ID) (map[devices.ID]string, error)
	// InUse returns an open job that gives devices an image, or an empty text.
	InUse func(ctx context.Context, image string) (job string, err error)
	Log   *slog.Logger
}

// Manager keeps and shows images. It is safe for concurrent use. Errors are *devices.Error or those of Store.
type Manager struct {
	Options
	files     *files
	verifying sync.Mutex   // one signed file is in memory at a time
	bytes     sync.RWMutex // shared by who adds bytes with their rows, and held by who deletes those without one
}

// New returns a Manager.
func New(o Options) *Manager {
	return &Manager{Options: o, files: newFiles(o.Dir, o.JetStream, o.Bucket, o.Replicas)}
}

// Tidy deletes what this node's disk and the object store have had of no image for a while, and writes images of the disk to the object
// store that it has lost. Every node does it when it starts and about once an hour.
func (m *Manager) Tidy(ctx context.Context) {
	repaired, err := m.tidy(ctx)
	if repaired > 0 {
		m.Log.Info("firmware images were missing in the object store, and are there again", "images", repaired)
	}
	if err != nil && ctx.Err() == nil {
		m.Log.Warn("the stored bytes of the firmware images could not be compared with the database; trying again within the hour", "error", err)
	}
}

func (m *Manager) tidy(ctx context.Context) (repaired int, err error) {
	images, err := m.Store.Images(ctx)
	if err != nil {
		return 0, err
	}
	stored := idsOf(images)
	objects, err := m.files.objects(ctx)
	if err != nil {
		return 0, errors.Join(err, m.files.clean(stored))
	}
	unused, err := m.files.unused(ctx, stored, objects)
	err = errors.Join(err, m.files.clean(stored))
	for _, id := range unused {
		err = errors.Join(err, m.drop(ctx, id))
	}
	for _, object := range objects {
		delete(stored, object.Name)
	}
	for id := range stored {
		put, no := m.files.repair(ctx, id)
		if err = errors.Join(err, no); put && no == nil {
			repaired++
		}
	}
	return repaired, err
}

func idsOf(images []Image) map[string]bool {
	ids := make(map[string]bool, len(images))
	for i := range images {
		ids[images[i].ID()] = true
	}
	return ids
}

// drop deletes the bytes of an image that is not stored, or not any more. Another node that adds it meanwhile writes them again.
func (m *Manager) drop(ctx context.Context, id string) error {
	m.bytes.Lock()
	defer m.bytes.Unlock()
	if _, _, err := m.find(ctx, id); devices.CodeOf(err) != devices.CodeNotFound {
		return err
	}
	return m.files.remove(ctx, id)
}

// PermitChange refuses callers that may not add, change or delete images: an image is for the whole fleet.
func PermitChange(by access.Principal) error {
	if by.Caller.OwnJobsOnly() {
		return &devices.Error{Code: devices.CodeForbidden, Rule: access.RuleDevices, Detail: "the key is limited to some devices or tools, and firmware images are for all; use a key without limits"}
	}
	return nil
}

// Upload is a file to add.
type Upload struct {
	File      io.ReaderAt
	Size      int64
	Note      string
	SHA256    string // of the file, as its sender announced it; empty: not announced
	Signature string // of minisign, over the file
	DryRun    bool   // only say what would become of it
}

// Add adds the images of a file. fresh reports whether one of them is new. The error of a file that is not fit has
// devices.CodeImageInvalid and every fault; nothing of it is added.
func (m *Manager) Add(ctx context.Context, by access.Principal, u Upload) (added api.AddedFirmware, fresh bool, err error) {
	sum := sha256.New()
	if _, err := io.Copy(sum, io.NewSectionReader(u.File, 0, u.Size)); err != nil {
		return added, false, noDisk(err)
	}
	file := hex.EncodeToString(sum.Sum(nil))
	noted := false
	defer func() {
		if !u.DryRun && err != nil && !noted {
			m.Fleet.NoteChange(by, "add_firmware", "", "file "+file, err)
		}
	}()
	if len(u.Note) > maxNote {
		return added, false, devices.Errorf(devices.CodeBadRequest, "note: it may have %d bytes", maxNote)
	}
	a := addition{files: m.files, kept: map[string]*os.File{}}
	defer a.discard()
	found, err := m.inspect(u, file, &a)
	if err != nil {
		return added, false, err
	}
	present, err := m.Store.Images(ctx)
	if err != nil {
		return added, false, err
	}
	var missing []Image
	for _, x := range found.Images {
		image := Image{Image: *x, Note: u.Note, AddedBy: by.Name(), AddedAt: clock.Now().UTC().Truncate(time.Microsecond)}
		if at := slices.IndexFunc(present, func(p Image) bool { return p.SHA256 == x.SHA256 }); at >= 0 {
			image = present[at]
			image.File = x.File
		} else if !slices.ContainsFunc(missing, func(p Image) bool { return p.SHA256 == x.SHA256 }) {
			missing = append(missing, image)
		}
		added.Items = append(added.Items, image.view())
	}
	added.Dropped = append([]string{}, found.Dropped...)
	objects, err := m.files.objects(ctx)
	if err != nil {
		return added, false, err
	}
	bytes, known := sizeOf(present), idsOf(slices.Concat(present, missing))
	for _, object := range objects { // those of no image need room, too, until they are deleted
		if !known[object.Name] {
			bytes += int64(object.Size)
		}
	}
	if err := m.permitSize(missing, len(present), bytes); err != nil {
		return added, false, err
	}
	if u.DryRun {
		return added, len(missing) > 0, nil
	}
	if missing, err = m.store(ctx, a.kept, missing); err != nil {
		return added, false, err
	}
	noted = true
	for i := range missing {
		m.Fleet.NoteChange(by, "add_firmware", "", missing[i].ID(), nil)
	}
	return added, len(missing) > 0, m.complete(ctx, by, added.Items)
}

// inspect reads a file, and returns what it has if it is fit.
func (m *Manager) inspect(u Upload, sum string, a *addition) (*espimage.File, error) {
	keep := a.keep
	if u.DryRun {
		keep = nil
	}
	found, err := espimage.Inspect(u.File, u.Size, m.MaxFile, keep)
	if err != nil {
		return nil, noDisk(err)
	}
	faults := found.AllFaults()
	if u.SHA256 != "" && !strings.EqualFold(u.SHA256, sum) {
		faults = append(faults, espimage.Fault{Code: "sha256", Text: fmt.Sprintf("The file arrived with the SHA-256 %s, which is not the announced one. Send it again.", sum)})
	}
	if len(m.Keys) > 0 {
		m.verifying.Lock()
		fault, err := m.Keys.verify(u.File, u.Size, u.Signature)
		m.verifying.Unlock()
		if err != nil {
			return nil, noDisk(err)
		}
		if fault != nil {
			faults = append(faults, *fault)
		}
	}
	if len(faults) > 0 {
		problem := devices.Errorf(devices.CodeImageInvalid, "%s", faults[0].Text)
		for _, f := range faults {
			problem.Findings = append(problem.Findings, finding("error", f))
		}
		return nil, problem
	}
	return found, nil
}

// permitSize refuses images for which there is no room.
func (m *Manager) permitSize(more []Image, count int, bytes int64) error {
	switch {
	case len(more) == 0:
	case count+len(more) > MaxImages:
		return devices.Errorf(devices.CodeLimitReached, "the fleet may keep %d firmware images; delete some that no device needs", MaxImages)
	case bytes+sizeOf(more) > m.Storage:
		return devices.Errorf(devices.CodeLimitReached, "the firmware images would have %d bytes, and --firmware-storage is %d; delete some that no device needs", bytes+sizeOf(more), m.Storage)
	}
	return nil
}

func sizeOf(images []Image) (bytes int64) {
	for i := range images {
		bytes += images[i].Size
	}
	return bytes
}

// store stores the bytes of images, also of those that are known, whose bytes may be lost, and the rows of those that are missing. It returns
// those that nobody else has added meanwhile.
func (m *Manager) store(ctx context.Context, contents map[string]*os.File, missing []Image) ([]Image, error) {
	m.bytes.RLock()
	defer m.bytes.RUnlock()
	for id, content := range contents {
		err := m.files.put(ctx, id, content)
		if err == nil {
			err = m.files.keep(content, id)
		}
		if err != nil {
			return nil, err
		}
	}
	if len(missing) > 0 {
		var err error
		if missing, err = m.Store.Add(ctx, missing, func(count int, bytes int64) error { return m.permitSize(missing, count, bytes) }); err != nil {
			return nil, err
		}
	}
	for id := range contents { // another node may have deleted the image, and its bytes before the new row was there
		if _, err := m.files.repair(ctx, id); err != nil {
			return nil, err
		}
	}
	return missing, nil
}

// addition has the files of the images of an upload.
type addition struct {
	files    *files
	kept     map[string]*os.File // by the id of the image
	discards []func()
}

// keep is for espimage.Inspect.
func (a *addition) keep() (io.Writer, func(*espimage.Image) error, error) {
	file, discard, err := a.files.create()
	if err != nil {
		return nil, nil, err
	}
	a.discards = append(a.discards, discard)
	return file, func(image *espimage.Image) error {
		if image != nil {
			a.kept[hex.EncodeToString(image.SHA256[:])] = file
		}
		return nil
	}, nil
}

// discard removes the files that were not kept.
func (a *addition) discard() {
	for _, discard := range a.discards {
		discard()
	}
}

// Filter selects images of a list; empty members select all.
type Filter struct{ Version, Board, Kind string }

// List returns the selected images, newest first.
func (m *Manager) List(ctx context.Context, by access.Principal, f Filter) ([]api.FirmwareImage, error) {
	images, err := m.Store.Images(ctx)
	if err != nil {
		return nil, err
	}
	list := []api.FirmwareImage{}
	for i := range images {
		view := images[i].view()
		if (f.Version == "" || view.Version == f.Version) && (f.Board == "" || slices.Contains(view.Boards, f.Board)) && (f.Kind == "" || view.Kind == f.Kind) {
			list = append(list, view)
		}
	}
	return list, m.complete(ctx, by, list)
}

// complete makes images what the caller may see: with the number of devices that run them, unless the key is limited to devices, and without
// the names of other keys if it is limited to devices or tools.
func (m *Manager) complete(ctx context.Context, by access.Principal, list []api.FirmwareImage) error {
	if by.Caller.OwnJobsOnly() {
		for i := range list {
			list[i].AddedBy = ""
		}
	}
	if by.Caller.Limited() || len(list) == 0 {
		return nil
	}
	var elfs []string
	for i := range list {
		elfs = append(elfs, list[i].ELF)
	}
	running, err := m.Store.Running(ctx, elfs)
	for i := range list {
		n := running[list[i].ELF]
		list[i].Devices = &n
	}
	return err
}

// find returns the image with this SHA-256, or the one whose SHA-256 begins with these digits.
func (m *Manager) find(ctx context.Context, id string) (Image, []Image, error) {
	if id = strings.ToLower(id); !IsID(id) {
		return Image{}, nil, devices.Errorf(devices.CodeBadRequest, "image: %q names none; give 12 to 64 hex digits of its SHA-256", id)
	}
	images, err := m.Store.Images(ctx)
	if err != nil {
		return Image{}, nil, err
	}
	var found []Image
	for i := range images {
		if strings.HasPrefix(images[i].ID(), id) {
			found = append(found, images[i])
		}
	}
	switch len(found) {
	case 0:
		return Image{}, nil, devices.Errorf(devices.CodeNotFound, "no firmware image %s is stored; GET /v1/firmware lists them", id)
	case 1:
		return found[0], images, nil
	}
	return Image{}, nil, devices.Errorf(devices.CodeConflict, "%d firmware images begin with %s; give more digits", len(found), id)
}

// Get returns an image.
func (m *Manager) Get(ctx context.Context, by access.Principal, id string) (api.FirmwareImage, error) {
	image, _, err := m.find(ctx, id)
	if err != nil {
		return api.FirmwareImage{}, err
	}
	list := []api.FirmwareImage{image.view()}
	err = m.complete(ctx, by, list)
	return list[0], err
}

// Open returns an image and its bytes, which were compared with its SHA-256. The caller closes the file.
func (m *Manager) Open(ctx context.Context, id string) (api.FirmwareImage, *os.File, error) {
	image, _, err := m.find(ctx, id)
	if err != nil {
		return api.FirmwareImage{}, nil, err
	}
	file, err := m.files.open(ctx, image.ID())
	return image.view(), file, err
}

// Edit changes the note and the boards of an image.
func (m *Manager) Edit(ctx context.Context, by access.Principal, id string, e api.FirmwareEdit) (api.FirmwareImage, error) {
	err := PermitChange(by)
	if err == nil && e.Note != nil && len(*e.Note) > maxNote {
		err = devices.Errorf(devices.CodeBadRequest, "body.note: it may have %d bytes", maxNote)
	}
	if err == nil && e.Boards != nil && slices.ContainsFunc(*e.Boards, func(b string) bool { return b == "" || len(b) > maxBoard || cleantext.Line(b) != b }) {
		err = devices.Errorf(devices.CodeBadRequest, "body.boards: a board is a line of 1 to %d bytes without blanks around it", maxBoard)
	}
	if err != nil {
		return api.FirmwareImage{}, m.note(by, "edit_firmware", id, err)
	}
	image, _, err := m.find(ctx, id)
	if err != nil {
		return api.FirmwareImage{}, err
	}
	detail := image.ID()
	if e.Boards != nil {
		detail += fmt.Sprintf(" boards %q", *e.Boards)
	}
	if err := m.note(by, "edit_firmware", detail, m.Store.Edit(ctx, image.ID(), e.Note, e.Boards)); err != nil {
		return api.FirmwareImage{}, err
	}
	return m.Get(ctx, by, image.ID())
}

// note records a change, or the attempt, and returns its error.
func (m *Manager) note(by access.Principal, action, detail string, err error) error {
	m.Fleet.NoteChange(by, action, "", detail, err)
	return err
}

// Delete deletes an image. While devices run it, or ran it last, that needs force: they have no way back to it then.
func (m *Manager) Delete(ctx context.Context, by access.Principal, id string, force bool) error {
	if err := PermitChange(by); err != nil {
		return m.note(by, "delete_firmware", id, err)
	}
	image, _, err := m.find(ctx, id)
	if err != nil {
		return err
	}
	err = m.Store.Delete(ctx, image.ID(), func() error {
		switch job, err := m.InUse(ctx, image.ID()); {
		case err != nil:
			return err
		case job != "":
			return devices.Errorf(devices.CodeConflict, "the open job %s gives devices this image; cancel it first", job)
		case !force:
			return m.checkUse(ctx, &image)
		}
		return nil
	})
	if err := m.note(by, "delete_firmware", image.ID(), err); err != nil {
		return err
	}
	if err := m.drop(ctx, image.ID()); err != nil {
		m.Log.Warn("the bytes of a deleted firmware image are left over, and are deleted within two hours", "image", image.ID(), "error", err)
	}
	return nil
}

// checkUse refuses to delete an image that devices may need.
func (m *Manager) checkUse(ctx context.Context, image *Image) error {
	running, err := m.Store.Running(ctx, []string{image.ELFText()})
	if err != nil {
		return err
	}
	former, err := m.Store.Former(ctx, image.ELFText())
	if n := running[image.ELFText()]; err == nil && n+former > 0 {
		err = devices.Errorf(devices.CodeConflict, "devices run this image: %d; devices ran it last, and lose their way back: %d; delete it with force=true if nobody needs it", n, former)
	}
	return err
}
