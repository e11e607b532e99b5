"""Public sets of photographs other than ImageNet's."""

from kedge.data.sources import folders, photographs
from kedge.data.sources.entry import NOT_STATED, Checksum, File, Form, Source, archive_at, from_torchvision

_FLOWERS = "https://www.robots.ox.ac.uk/~vgg/data/flowers/102"


PHOTO_SETS = (
    Source(
        name="textures",
        title="Textures (DTD)",
        homepage="https://www.robots.ox.ac.uk/~vgg/data/dtd/",
        licence="for research purposes",
        splits=("all", "train", "val", "test", *(f"{s}{i}" for s in ("train", "val", "test") for i in range(1, 11))),
        split_help="all, train, val, test (partition 1), test2 and so on to test10",
        default="all",
        files=(
            archive_at(
                "https://www.robots.ox.ac.uk/~vgg/data/dtd/download/dtd-r1.0.1.tar.gz",
                from_torchvision("fff73e5086ae6bdbea199a49dfb8a4c1", "dtd"),
                "dtd",
            ),
        ),
        forms=(Form(("dtd",), folders.read_textures),),
    ),
    Source(
        name="places365",
        title="Places365 (validation, 256 x 256)",
        homepage="https://places2.csail.mit.edu/",
        licence="Places2 terms: non-commercial research and education",
        splits=("val",),
        default="val",
        files=(
            archive_at(
                "https://data.csail.mit.edu/places/places365/filelist_places365-standard.tar",
                from_torchvision("35a0585fee1fa656440f3ab298f8479c", "places365"),
                "categories_places365.txt",
                "places365_val.txt",
            ),
            archive_at(
                "https://data.csail.mit.edu/places/places365/val_256.tar",
                from_torchvision("e27b17d8d44f4af9a78502beb927f808", "places365"),
                "val_256",
            ),
        ),
        forms=(Form(("val_256", "places365_val.txt", "categories_places365.txt"), folders.read_places365),),
    ),
    Source(
        name="oxford-pets",
        title="Oxford-IIIT Pet",
        homepage="https://www.robots.ox.ac.uk/~vgg/data/pets/",
        licence="CC-BY-SA-4.0",
        splits=("all", "trainval", "test"),
        default="all",
        files=(
            archive_at(
                "https://www.robots.ox.ac.uk/~vgg/data/pets/data/images.tar.gz",
                from_torchvision("5c4f3ee8e5d25df40f4fd59a7f44e54c", "oxford_iiit_pet"),
                "images",
            ),
            archive_at(
                "https://www.robots.ox.ac.uk/~vgg/data/pets/data/annotations.tar.gz",
                from_torchvision("95a8c909bbe2e81eed6a22bccdf3f68f", "oxford_iiit_pet"),
                "annotations",
            ),
        ),
        forms=(Form(("images", "annotations"), photographs.read_pets),),
    ),
    Source(
        name="flowers-102",
        title="Oxford Flowers-102",
        homepage="https://www.robots.ox.ac.uk/~vgg/data/flowers/102/",
        licence=NOT_STATED,
        splits=("all", "train", "val", "test"),
        default="all",
        files=(
            archive_at(
                f"{_FLOWERS}/102flowers.tgz",
                from_torchvision("52808999861908f626f3c1f4e79d11fa", "flowers102"),
                "jpg",
            ),
            *(
                archive_at(f"{_FLOWERS}/{file}", from_torchvision(digest, "flowers102"))
                for file, digest in (
                    ("imagelabels.mat", "e0620be6f572b9609742df49c70aed4d"),
                    ("setid.mat", "a5357ecc9cb78c4bef273ce3793fc85c"),
                )
            ),
        ),
        forms=(Form(("jpg", "imagelabels.mat", "setid.mat"), photographs.read_flowers),),
    ),
    Source(
        name="caltech-101",
        title="Caltech-101, without backgrounds",
        homepage="https://data.caltech.edu/records/mzrjq-6wc02",
        licence="CC-BY-4.0",
        splits=("all",),
        default="all",
        files=(
            archive_at(
                "https://data.caltech.edu/records/mzrjq-6wc02/files/caltech-101.zip",
                Checksum("md5", "3138e1922a9193bfa496528edbbc45d0", "md5, torchvision for R, dataset-caltech"),
                "caltech-101",
            ),
            File(
                "caltech-101/101_ObjectCategories.tar.gz",
                checksum=from_torchvision("b224c7392d521a49829488ab0f1120d9", "caltech"),
                holds=("101_ObjectCategories",),
            ),
        ),
        forms=(Form(("101_ObjectCategories",), photographs.read_caltech101),),
    ),
    Source(
        name="cub-200",
        title="Caltech-UCSD Birds-200-2011",
        homepage="https://data.caltech.edu/records/65de6-vp158",
        licence=NOT_STATED,
        splits=("all", "train", "test"),
        default="all",
        files=(
            archive_at(
                "https://data.caltech.edu/records/65de6-vp158/files/CUB_200_2011.tgz",
                Checksum("md5", "97eceeb196236b17998738112f37df78", "md5, avalanche-lib, datasets/cub200"),
                "CUB_200_2011",
            ),
        ),
        forms=(Form(("CUB_200_2011",), photographs.read_cub),),
    ),
    Source(
        name="stanford-dogs",
        title="Stanford Dogs",
        homepage="https://www.tensorflow.org/datasets/catalog/stanford_dogs",
        licence=f"{NOT_STATED}; the images are ImageNet's",
        splits=("all",),
        default="all",
        files=(File("images.tar", holds=("Images",)),),
        forms=(Form(("Images",), folders.read_classes),),
        by_hand="take images.tar from its authors' page, vision.stanford.edu/aditya86/ImageNetDogs, and put it into "
        "{folder}",
    ),
    Source(
        name="food-101",
        title="Food-101",
        homepage="https://data.vision.ee.ethz.ch/cvl/datasets_extra/food-101/",
        licence=f"{NOT_STATED}; the images are Foodspotting's",
        splits=("train", "test"),
        files=(
            archive_at(
                "https://data.vision.ee.ethz.ch/cvl/food-101.tar.gz",
                from_torchvision("85eeb15f3717b99a5da872d97d918f87", "food101"),
                "food-101",
            ),
        ),
        forms=(Form(("food-101",), photographs.read_food),),
    ),
    Source(
        name="eurosat",
        title="EuroSAT (RGB)",
        homepage="https://zenodo.org/records/7711810",
        licence="MIT",
        splits=("all",),
        default="all",
        files=(
            archive_at(
                "https://zenodo.org/records/7711810/files/EuroSAT_RGB.zip",
                Checksum("md5", "f46e308c4d50d4bf32fedad2d3d62f3b", "md5, Zenodo record 7711810"),
                "EuroSAT_RGB",
            ),
        ),
        forms=(Form(("EuroSAT_RGB",), folders.read_classes),),
    ),
    Source(
        name="gtsrb",
        title="German traffic signs (test images)",
        homepage="https://benchmark.ini.rub.de/gtsrb_dataset.html",
        licence=NOT_STATED,
        splits=("test",),
        files=(
            archive_at(
                "https://sid.erda.dk/public/archives/daaeac0d7ce1152aea9b61d9f1e19370/GTSRB_Final_Test_Images.zip",
                from_torchvision("c7e4e6327067d32654124b0fe9e82185", "gtsrb"),
                "GTSRB",
            ),
        ),
        forms=(Form(("GTSRB/Final_Test/Images",), folders.read_unlabelled),),
    ),
)
